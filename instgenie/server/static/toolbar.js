// The toolbar: the tool in hand, the size of its brush, the menu for what finds no room, and the keys for all of it.
import { find } from "./dom.js";

const TOOL_KEYS = { s: "select", b: "brush", e: "eraser", r: "box", l: "lasso", h: "hand" };
const BUTTON_KEYS = { i: "invert", "+": "zoom-in", "=": "zoom-in", "-": "zoom-out", 0: "fit", o: "open" };
const REPEATED = ["grow", "shrink"]; // buttons that people press several times: the menu stays open

export class Toolbar {
  // `onTool` hears of a new tool.
  constructor(input, onTool) {
    Object.assign(this, { input, onTool });
    find("tools").addEventListener("change", ({ target }) => target.name === "tool" && this.take(target.value));
    find("size").addEventListener("input", ({ target }) => this.setSize(target.value));
    find("more-tools").addEventListener("click", () => this.openMenu(!this.isMenuOpen));
    find("rest").addEventListener("click", ({ target }) => {
      if (!REPEATED.includes(target.closest("button")?.id)) this.openMenu(false);
    });
    document.addEventListener("pointerdown", ({ target }) => target.closest("#rest, #more-tools") || this.openMenu(false));
    this.take("brush");
  }

  take(tool) {
    this.input.tool = tool;
    this.input.hideCursor();
    find("board").dataset.tool = tool;
    document.querySelector(`[name=tool][value=${tool}]`).checked = true;
    find("size").disabled = !this.input.paints;
    this.onTool(tool);
  }

  setSize(value) {
    find("size").value = Math.min(Math.max(value, 1), 50);
    this.input.brush = find("size").value / 100;
  }

  get isMenuOpen() {
    return find("more-tools").ariaExpanded === "true";
  }

  openMenu(isOpen) {
    find("more-tools").ariaExpanded = String(isOpen);
  }

  // Does what the key stands for, if it stands for something here.
  key({ key, shiftKey }) {
    const name = key.toLowerCase();
    if (name === "escape" && this.isMenuOpen) {
      this.openMenu(false);
      find("more-tools").focus();
    } else if (name in TOOL_KEYS) this.take(TOOL_KEYS[name]);
    else if (name in BUTTON_KEYS) find(BUTTON_KEYS[name]).click();
    else if (name === "g") find(shiftKey ? "shrink" : "grow").click();
    else if (name === "[" || name === "]") this.setSize(Number(find("size").value) + (name === "]" ? 2 : -2));
  }
}
