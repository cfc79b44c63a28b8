// The results: a strip of thumbnails, the facts beside the one that is shown, and what can be done with it.
import { asJpeg } from "./picture.js";
import { element, find } from "./dom.js";
import { showFacts } from "./facts.js";
import { thumbnail } from "./picture.js";
import { withText } from "./png.js";

const MAX_KEPT = 24;
const SIDE = 128;
export const PNG_KEYWORD = "instgenie";

export class Results {
  constructor({ onChoose, onForget, say }) {
    Object.assign(this, { onChoose, onForget, say });
    this.strip = find("strip");
    this.buttons = new Map(); // by result, oldest first
    this.shown = null;
    find("download").addEventListener("dragstart", (event) => this.drag(event, this.shown));
    find("jpeg").addEventListener("click", () => this.downloadJpeg());
    find("copy").addEventListener("click", () => this.copy());
    find("copy").hidden = !(navigator.clipboard && window.ClipboardItem); // browsers offer it on secure pages only
  }

  add(result) {
    const button = element(
      "button",
      { type: "button", draggable: true, ariaLabel: `Result: ${result.values.prompt}, seed ${result.facts.seed}`, title: result.values.prompt },
      thumbnail(result.bitmap, SIDE),
    );
    button.addEventListener("click", () => this.onChoose(result));
    button.addEventListener("dragstart", (event) => this.drag(event, result));
    this.buttons.set(result, button);
    this.strip.prepend(button);
    find("history").hidden = false;
    if (this.buttons.size > MAX_KEPT) this.forget(this.buttons.keys().next().value);
  }

  forget(result) {
    this.buttons.get(result).remove();
    this.buttons.delete(result);
    find("history").hidden = !this.buttons.size;
    URL.revokeObjectURL(result.url);
    this.onForget(result);
  }

  forgetAll() {
    for (const result of [...this.buttons.keys()]) this.forget(result);
    this.show(null);
  }

  // Shows the facts of a result; null: of none.
  show(result) {
    this.shown = result;
    for (const [one, button] of this.buttons) button.setAttribute("aria-current", String(one === result));
    find("result").hidden = find("actions").hidden = !result;
    if (!result) return;
    find("result-name").textContent = result.values.prompt || "Result";
    showFacts(find("facts"), result);
    result.url ??= URL.createObjectURL(result.file);
    Object.assign(find("download"), { href: result.url, download: nameOf(result, "png") });
  }

  drag(event, result) {
    result.url ??= URL.createObjectURL(result.file);
    const name = nameOf(result, "png");
    event.dataTransfer.effectAllowed = "copy";
    event.dataTransfer.setData("DownloadURL", `image/png:${name}:${result.url}`);
    event.dataTransfer.items.add(new File([result.file], name, { type: "image/png" }));
  }

  async downloadJpeg() {
    const { shown } = this;
    const url = URL.createObjectURL(await asJpeg(shown.file));
    element("a", { href: url, download: nameOf(shown, "jpg") }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  }

  async copy() {
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": this.shown.file })]);
      this.say("The result is in the clipboard.");
    } catch {
      this.say("The browser does not allow the page to copy: drag the result out, or download it.");
    }
  }
}

export const nameOf = ({ picture, facts }, ending) => `${picture.name.replace(/\.\w+$/, "")}-${facts.seed}.${ending}`;

// Returns the result's file with the settings that made it inside; a picture editor ignores them, this page reads them.
export function signed(made, values) {
  return withText(made.file, PNG_KEYWORD, JSON.stringify({ ...values, seed: String(made.facts.seed), n: "1" }));
}
