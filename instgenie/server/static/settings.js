// The controls of the fields in fields.js: makes them, reads, writes and checks them. Knows no single field.
import { element, find } from "./dom.js";
import { FIELDS } from "./fields.js";

export class Settings {
  constructor(onChange) {
    this.fields = FIELDS;
    this.onChange = onChange;
    for (const place of document.querySelectorAll("[data-fields]")) {
      place.append(...FIELDS.filter((field) => field.place === place.dataset.fields).flatMap(controlOf));
    }
    for (const field of FIELDS) {
      find(field.id).addEventListener("input", () => this.changed(field));
      if (field.kind === "number") selectAtFocus(find(field.id));
    }
    this.write({});
  }

  // Takes ranges, choices and defaults from the server. What it does not know is hidden and not sent.
  learn(limits) {
    this.fields = FIELDS.filter(({ name }) => name in limits);
    for (const field of FIELDS) {
      find(field.id).closest(".field").hidden = !(field.name in limits);
      if (field.name in limits) limit(field, limits[field.name]);
    }
    for (const place of document.querySelectorAll("details:has([data-fields])")) {
      place.hidden = !place.querySelector(".field:not([hidden])");
    }
  }

  changed(field) {
    showValue(field);
    this.onChange(field);
  }

  // Returns {name: value} of the fields whose value is not the first one: what a request needs to say.
  read() {
    const values = this.fields.map((field) => [field.name, valueOf(field)]);
    return Object.fromEntries(values.filter(([, value], at) => value !== (this.fields[at].first ?? "")));
  }

  // Sets every field, those that are not named to their first value; `only` leaves those alone.
  write(values, { only = false } = {}) {
    for (const field of FIELDS) {
      if (only && !(field.name in values)) continue;
      setValue(field, values[field.name] ?? field.first ?? "");
      showValue(field);
    }
  }

  // Returns [message, id] for the first value out of its range; undefined if all are fine.
  mistake() {
    for (const { id, label } of this.fields) {
      const { validity, min, max } = find(id);
      if (!validity.valid) return [`${label}: a number from ${min} to ${max} is expected.`, id];
    }
  }

  idOf(name) {
    return FIELDS.find((field) => field.name === name)?.id;
  }

  // The settings as the part of an address after #, and back. Names there are the controls' ids.
  get query() {
    const values = this.read();
    const kept = this.fields.filter(({ name, keeps = true }) => keeps && name in values);
    return new URLSearchParams(kept.map(({ id, name }) => [id, values[name]])).toString();
  }

  set query(text) {
    const given = new URLSearchParams(text);
    const known = FIELDS.filter(({ id, keeps = true }) => keeps && given.has(id));
    if (!known.length) return;
    const values = this.read();
    const others = FIELDS.filter(({ name, keeps = true }) => !keeps && name in values); // no address says anything of them
    this.write(Object.fromEntries([...others.map(({ name }) => [name, values[name]]), ...known.map(({ id, name }) => [name, given.get(id)])]));
  }
}

const MAKERS = {
  number: ({ id, step = 1 }) => element("input", { id, type: "number", step, inputMode: step === "any" ? "decimal" : "numeric" }),
  slider: ({ id, step, minimum = 0, maximum = 1 }) => element("input", { id, type: "range", min: minimum, max: maximum, step }),
  choice: ({ id, choices = {} }) => element("select", { id }, ...optionsOf(choices)),
  switch: ({ id }) => element("input", { id, type: "checkbox", role: "switch" }),
  text: ({ id }) => element("textarea", { id, rows: 1, spellcheck: false }),
};

// What is typed first replaces the number. The click that gives the focus would put the cursor into it.
function selectAtFocus(control) {
  control.addEventListener("focus", () => {
    control.select();
    control.addEventListener("click", () => control.select(), { once: true });
  });
}

const optionsOf = (choices) => Object.entries(choices).map(([value, textContent]) => element("option", { value, textContent }));

// Returns the field and its help, which takes the row below when the "?" is pressed.
function controlOf(field) {
  const { id, label, kind, wide, help } = field;
  const control = MAKERS[kind](field);
  const name = element("div", { className: "name" }, element("label", { htmlFor: id, textContent: label }));
  if (kind === "slider") name.append(Object.assign(element("output", { id: `${id}-value` }), { htmlFor: id }));
  const made = [element("div", { className: `field ${kind}${wide ? " wide" : ""}` }, name, control)];
  if (help) {
    const text = element("p", { id: `${id}-help`, className: "help", textContent: help, hidden: true });
    const button = element("button", { type: "button", className: "why", textContent: "?", ariaLabel: `About ${label}`, ariaExpanded: "false" });
    button.setAttribute("aria-controls", text.id);
    button.addEventListener("click", () => (button.ariaExpanded = String(!(text.hidden = !text.hidden))));
    control.setAttribute("aria-describedby", text.id);
    name.append(button);
    made.push(text);
  }
  return made;
}

function limit(field, { minimum, maximum, choices, own, max_length }) {
  const control = find(field.id);
  if (field.kind === "number" || field.kind === "slider") {
    control.min = Math.max(minimum ?? -Infinity, field.minimum ?? -Infinity);
    control.max = Math.min(maximum ?? Infinity, field.maximum ?? Infinity);
  }
  if (field.kind === "number") control.placeholder = own ?? field.hint ?? "";
  if (field.kind === "choice" && !field.choices && choices && !control.options.length) {
    control.append(...optionsOf(Object.fromEntries(choices.map((choice) => [choice, choice]))));
    setValue(field, field.first ?? choices[0]);
  }
  if (max_length && "maxLength" in control) control.maxLength = max_length;
}

function valueOf({ id, kind }) {
  const control = find(id);
  return kind === "switch" ? String(control.checked) : control.value.trim();
}

function setValue({ id, kind }, value) {
  if (kind === "switch") find(id).checked = value === true || value === "true";
  else find(id).value = value;
}

function showValue({ id, kind, unit }) {
  if (kind === "slider") find(`${id}-value`).textContent = `${find(id).value}${unit ? ` ${unit}` : ""}`;
}
