// The zoom as a percentage that can be read and typed: at 100 %, one pixel of the picture is one pixel of the window.

export class ZoomField {
  constructor(field, board) {
    Object.assign(this, { field, board });
    board.onZoom = () => this.show();
    field.addEventListener("focus", () => field.select());
    field.addEventListener("change", () => this.set(Number.parseFloat(field.value) / 100));
    field.addEventListener("keydown", ({ key }) => key === "Enter" && field.blur());
  }

  // A scale that is not a number leaves the view as it is.
  set(scale) {
    if (scale > 0) this.board.view.zoomTo(scale);
    this.board.redraw();
    this.show();
  }

  show() {
    if (document.activeElement === this.field) return;
    const percent = this.board.view.scale * 100;
    this.field.value = `${percent < 10 ? percent.toFixed(1) : Math.round(percent)} %`;
  }
}
