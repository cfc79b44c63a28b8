// The ControlNets of an edit, each with the image that it follows, a scale, and the part of the steps that it guides. Their
// text is the JSON that the API reads; an image of the user's is a data: URL in it, and goes to the server as a file.
import { Chosen } from "./chosen.js";
import { element } from "./dom.js";

const EDGES = "canny"; // the word for an image that the server makes of the picture
const MAX_SCALE = 2; // of the slider; a request may have more
const IMAGE = /^data:image\/[\w.+-]+;base64,/;

// Returns [{name, image, scale, start, end}, ...]; what is no such list is none.
export function controlsIn(text) {
  try {
    const found = text ? JSON.parse(text) : [];
    return found.filter(({ name, image }) => typeof name === "string" && (image === EDGES || IMAGE.test(image)));
  } catch {
    return [];
  }
}

// Returns the parts of a form, [[name, value], ...]: the list, and a file for each image that is not made by the server.
export function controlParts(text) {
  const controls = controlsIn(text);
  const files = controls.filter(({ image }) => image !== EDGES).map(({ image }) => ["control_image[]", blobOf(image)]);
  const named = controls.map(({ image, ...rest }) => (image === EDGES ? { ...rest, image } : rest));
  return [["controls", JSON.stringify(named)], ...files];
}

function blobOf(url) {
  const bytes = atob(url.slice(url.indexOf(",") + 1));
  return new Blob([Uint8Array.from(bytes, (letter) => letter.charCodeAt(0))], { type: url.slice(5, url.indexOf(";")) });
}

function urlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

export class Controls extends Chosen {
  constructor(onChange) {
    const ids = ["controls", "add-control", "control-panel"];
    super({ ids, path: "/v1/controlnets", offered: "Add a ControlNet", most: 4 }, onChange);
  }

  // Those that do not fit the model are not offered, nor those that need to be told what kind of image they see.
  learn(data) {
    super.learn(data.filter(({ fits, num_modes }) => fits && num_modes === null));
  }

  get text() {
    const chosen = [...this.list.children].map(({ control }) => control);
    return chosen.length ? JSON.stringify(chosen) : "";
  }

  chosenIn(text) {
    return controlsIn(text);
  }

  fresh(name) {
    return { name, image: EDGES };
  }

  row({ name, image, scale = 1, start = 0, end = 1 }) {
    const control = { name, image, scale, start, end };
    const range = Math.max(MAX_SCALE, Math.abs(scale));
    const facts = { id: `weight-of-${name}`, name: `Scale of ${name}`, value: String(scale), minimum: 0, maximum: range, step: 0.05 };
    const slider = this.slider(facts, (value) => (control.scale = Number(value)));
    const label = element("span", { textContent: name, title: name });
    const head = element("div", { className: "adapter" }, label, ...slider, this.remover(name, () => row));
    const row = element("li", {}, head, this.source(control), this.window(control));
    row.control = control;
    row.dataset.name = name;
    return row;
  }

  // What the ControlNet sees: the picture's edges, or an image of the user's, which a small picture shows.
  source(control) {
    const { name } = control;
    const choice = element("select", { ariaLabel: `Image for ${name}` });
    choice.append(element("option", { value: EDGES, textContent: "Edges of the picture" }), element("option", { value: "own", textContent: "An image of mine" }));
    const file = element("input", { type: "file", accept: "image/png,image/jpeg,image/webp", ariaLabel: `Image file for ${name}`, hidden: true });
    const shown = element("img", { alt: "", width: 36, height: 36 });
    const change = element("button", { type: "button", className: "thumb", title: "Choose another image", ariaLabel: `Choose another image for ${name}`, onclick: () => file.click() }, shown);
    const show = () => {
      const isOwn = control.image !== EDGES;
      URL.revokeObjectURL(shown.src);
      choice.value = isOwn ? "own" : EDGES;
      change.hidden = !isOwn;
      if (isOwn) shown.src = URL.createObjectURL(blobOf(control.image));
    };
    choice.addEventListener("change", () => {
      if (choice.value === EDGES) control.image = EDGES;
      else file.click(); // the choice counts once there is an image
      show();
      this.onChange();
    });
    file.addEventListener("change", async () => {
      if (!file.files[0]) return;
      const url = await urlOf(file.files[0]);
      file.value = "";
      if (!IMAGE.test(url)) return;
      control.image = url;
      show();
      this.onChange();
    });
    show();
    return element("div", { className: "source" }, choice, change, file);
  }

  // The part of the steps that it guides, in percent: from one before the other.
  window(control) {
    const made = (key, word) => {
      const input = element("input", { type: "number", min: 0, max: 100, step: 1, inputMode: "numeric", ariaLabel: `${word} of ${control.name} in percent of the steps`, value: Math.round(control[key] * 100) });
      input.addEventListener("input", () => {
        const share = Number(input.value) / 100;
        const isFine = input.value !== "" && (key === "start" ? share >= 0 && share < control.end : share > control.start && share <= 1);
        input.ariaInvalid = String(!isFine);
        if (!isFine) return; // the last good one counts
        control[key] = share;
        this.onChange();
      });
      return input;
    };
    return element("div", { className: "window" }, "from", made("start", "Start"), "to", made("end", "End"), "% of the steps");
  }
}
