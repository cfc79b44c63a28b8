// The outline of the selected object as a line of marching ants over the board, and a still one of what a click would
// select. An SVG, so that the line moves without the picture being drawn again.

export class Ants {
  constructor(svg, board) {
    Object.assign(this, { svg, board });
    this.preview = null; // path of what a click would select
    board.onDraw = () => this.update();
  }

  update() {
    const { view, mask, mode } = this.board;
    const last = mask?.strokes.at(-1);
    const isShown = mode === "mask" && mask;
    const isSelected = last?.kind === "outline" && !last.erase;
    this.draw("selected", isShown && isSelected ? last.path : "");
    this.draw("preview", (isShown && this.preview) || "");
    this.svg.firstElementChild.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.scale})`);
  }

  draw(name, path) {
    for (const line of this.svg.querySelectorAll(`.${name}`)) {
      if (line.getAttribute("d") !== path) line.setAttribute("d", path);
    }
  }
}
