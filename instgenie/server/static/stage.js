// What the stage shows: the mask to paint, a result beside its original, the difference, all variants, a running edit.
import { FIRST_SPLIT } from "./board.js";
import { element, find } from "./dom.js";
import { contained } from "./picture.js";

export class Stage {
  constructor(board, onChoose) {
    Object.assign(this, { board, onChoose });
    this.result = null; // the one shown, or the last one shown
    this.cells = []; // of the grid
    find("modes").addEventListener("change", ({ target }) => this.setMode(target.value));
    find("split").addEventListener("input", ({ target }) => this.setSplit(target.value / 100));
    const hold = find("original");
    hold.addEventListener("pointerdown", () => this.holdOriginal(true));
    for (const kind of ["pointerup", "pointercancel", "pointerleave", "blur"]) hold.addEventListener(kind, () => this.holdOriginal(false));
  }

  get mode() {
    return this.board.mode;
  }

  open(picture, mask) {
    find("empty").hidden = true;
    find("tools").hidden = find("board").hidden = false;
    document.body.classList.add("has-picture");
    this.result = null;
    this.board.open(picture, mask);
    this.board.resize();
    this.board.view.fit();
    this.setMode("mask");
  }

  setMode(mode) {
    const { board, result } = this;
    board.mode = mode;
    find("modes").hidden = !result;
    find("all").hidden = !(result?.variants.length > 1);
    for (const option of document.getElementsByName("mode")) option.checked = option.value === mode;
    find("compare").hidden = mode !== "compare";
    find("grid").hidden = mode !== "grid";
    find("view").dataset.mode = mode;
    this.showSplit();
    board.redraw();
  }

  setSplit(share) {
    this.board.split = share;
    this.board.redraw();
  }

  showSplit() {
    find("split").value = this.board.split * 100;
  }

  // Shows a result, or with `all` every variant that was made with it.
  show(result, { all = false } = {}) {
    this.result = result;
    this.board.after = result.bitmap;
    this.board.split = FIRST_SPLIT;
    if (result.variants.length > 1) this.fillGrid(result);
    this.setMode(all && result.variants.length > 1 ? "grid" : "compare");
  }

  fillGrid(result) {
    this.makeCells(result.variants.length);
    result.variants.forEach((variant, at) => {
      this.fillCell(at, variant.bitmap, `seed ${variant.facts.seed}`);
      this.cells[at].ariaPressed = String(variant === result);
      this.cells[at].onclick = () => this.onChoose(variant);
    });
  }

  // Prepares for a run of several variants; they appear as they come.
  makeCells(count) {
    this.cells = Array.from({ length: count }, (_, at) =>
      element("button", { type: "button", className: "cell", ariaLabel: `Variant ${at + 1}` }, element("span", { className: "frame waiting" }), element("span", { className: "caption", textContent: `Variant ${at + 1}` })),
    );
    find("grid").style.setProperty("--columns", Math.ceil(Math.sqrt(count)));
    find("grid").replaceChildren(...this.cells);
  }

  fillCell(at, bitmap, about = "") {
    const name = `Variant ${at + 1}`;
    const caption = element("span", { className: "caption", textContent: name }, element("span", { className: "quiet", textContent: about }));
    this.cells[at].replaceChildren(element("span", { className: "frame" }, contained(bitmap, 768)), caption);
    this.cells[at].ariaLabel = about ? `${name}, ${about}` : name;
  }

  showPartial({ index, bitmap }, count) {
    if (count > 1) {
      this.fillCell(index, bitmap);
      if (this.mode !== "grid") this.setMode("grid");
      return;
    }
    this.board.after = bitmap;
    this.setMode("partial");
  }

  holdOriginal(isHeld) {
    if (this.board.showsOriginal === isHeld || (isHeld && !this.result)) return;
    this.board.showsOriginal = isHeld;
    find("view").classList.toggle("held", isHeld);
    this.board.redraw();
  }
}
