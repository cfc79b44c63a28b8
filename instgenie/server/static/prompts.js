// The prompt field with a list of suggestions, for mouse, touch and keyboard.
import { element, find } from "./dom.js";

const MAX_SHOWN = 40;
const MAX_RECENT = 20;

export class Prompts {
  constructor(field, list, chips) {
    Object.assign(this, { field, list, chips });
    this.all = [];
    this.recent = []; // prompts that were run, newest first
    this.words = null; // that the model knows; null: it may know all
    this.active = -1;
    field.addEventListener("input", () => this.suggest(this.matching(field.value)));
    field.addEventListener("input", () => this.check());
    field.addEventListener("blur", () => this.hide());
    field.addEventListener("keydown", (event) => this.key(event));
    find("recent").addEventListener("click", () => this.offer(this.recent));
    list.addEventListener("pointerdown", (event) => event.preventDefault()); // the field keeps the focus
    list.addEventListener("click", (event) => this.choose(event.target.closest("li")?.textContent));
  }

  learn({ prompts, colours }) {
    this.all = Object.values(prompts).flatMap((group) => group.flatMap((prompt) => coloured(prompt, colours)));
    this.chips.replaceChildren(
      ...Object.entries(prompts).map(([name, group]) =>
        element("button", {
          type: "button",
          className: "chip",
          textContent: name,
          onclick: () => this.offer(group.map((prompt) => withColour(prompt, ""))),
        }),
      ),
    );
  }

  remember(...prompts) {
    this.recent = [...new Set([...prompts, ...this.recent])].slice(0, MAX_RECENT);
    find("recent").hidden = !this.recent.length;
  }

  // Says which words of the prompt the model does not know.
  check(words = this.words) {
    this.words = words ? new Set(words) : null;
    const unknown = this.words ? wordsOf(this.field.value).filter((word) => !this.words.has(word)) : [];
    const notice = find("unknown");
    const quoted = [...new Set(unknown)].map((word) => `“${word}”`).join(", ");
    notice.textContent = notice.title = unknown.length ? `The model does not know ${quoted}.` : "";
  }

  offer(prompts) {
    this.field.focus();
    this.suggest(prompts);
  }

  matching(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return this.recent;
    const found = [...new Set([...this.recent, ...this.all])].filter((prompt) => words.every((word) => prompt.toLowerCase().includes(word)));
    return found.length === 1 && found[0] === text ? [] : found;
  }

  suggest(prompts) {
    const options = prompts.slice(0, MAX_SHOWN).map((prompt, at) =>
      Object.assign(element("li", { id: `prompt-${at}`, textContent: prompt }), { role: "option", ariaSelected: "false" }),
    );
    this.list.replaceChildren(...options);
    this.list.hidden = !options.length;
    this.field.setAttribute("aria-expanded", String(!this.list.hidden));
    this.activate(-1);
  }

  activate(at) {
    const options = [...this.list.children];
    this.active = at;
    options.forEach((option, index) => (option.ariaSelected = String(index === at)));
    const option = options[at];
    option?.scrollIntoView({ block: "nearest" });
    if (option) this.field.setAttribute("aria-activedescendant", option.id);
    else this.field.removeAttribute("aria-activedescendant");
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "ArrowDown" && this.list.hidden) this.suggest(this.matching(this.field.value));
    if (this.list.hidden) return;
    if (event.key === "ArrowDown") this.activate((this.active + 1) % this.list.children.length);
    else if (event.key === "ArrowUp") this.activate(this.active > 0 ? this.active - 1 : this.list.children.length - 1);
    else if (event.key === "Enter" && this.active >= 0) this.choose(this.list.children[this.active].textContent);
    else if (event.key === "Escape") this.hide();
    else return;
    event.preventDefault();
  }

  choose(prompt) {
    if (prompt) this.field.value = prompt;
    if (prompt) this.field.dispatchEvent(new Event("input"));
    this.hide();
  }

  hide() {
    this.suggest([]);
  }
}

const coloured = (prompt, colours) =>
  prompt.includes("{colour}") ? ["", ...colours].map((colour) => withColour(prompt, colour)) : [prompt];

const withColour = (prompt, colour) =>
  prompt.replace(/\{colour\} ?/, colour && `${colour} `).replace(/\ba (?=[aeiou])/g, "an ");

const wordsOf = (text) => text.toLowerCase().match(/[\p{L}\p{N}-]+/gu) ?? [];
