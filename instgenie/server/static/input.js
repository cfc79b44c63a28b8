// Mouse, touch, pen and keyboard input on the board: paints, picks objects, pans, zooms, and moves the line between
// before and after.
import { cornersOf } from "./board.js";

const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const WHEEL = 0.0015;
const CLICK = 6; // pixels of the window that a click may move
const LOOP = 2; // a path so many times as long as the way from its start to its end is a loop, else a box

export class BoardInput {
  constructor(board, onPainted, onSplit) {
    Object.assign(this, { board, onPainted, onSplit });
    this.tool = "brush"; // or select, eraser, box, lasso, hand
    this.onPick = () => {}; // one point of the select tool, or the corners of a box or loop
    this.onHover = () => {}; // a point under the resting mouse, or null
    this.brush = 0.12; // diameter as a share of the picture's shorter side
    this.pointers = new Map(); // last position of each, by pointer id
    this.action = null; // "paint", "outline", "pick", "pan", "split"
    const { canvas } = board;
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("pointercancel", (event) => this.up(event));
    canvas.addEventListener("pointerleave", () => this.action || this.leave());
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.lift());
    canvas.addEventListener("contextmenu", (event) => event.preventDefault());
  }

  get size() {
    const { width, height } = this.board.picture;
    return Math.max(this.brush * Math.min(width, height), 1);
  }

  get paints() {
    return this.tool === "brush" || this.tool === "eraser";
  }

  // pointers

  down(event) {
    const { board } = this;
    if (!board.picture || event.button === 2) return;
    board.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
    if (this.pointers.size === 2) return this.pinch();
    if (this.pointers.size > 2) return;
    const point = board.view.toPicture(event.offsetX, event.offsetY);
    if (event.button === 1 || this.tool === "hand" || board.mode === "partial") this.action = "pan";
    else if (board.mode === "compare") this.moveSplit(point);
    else this.begin(point, event.altKey);
    board.redraw();
  }

  // A second finger turns the gesture into a pinch, and undoes what the first finger began.
  pinch() {
    if (this.action === "paint") this.board.mask.undo();
    this.board.outline = null;
    this.board.cursor = null;
    this.action = "pan";
    this.board.redraw();
  }

  move(event) {
    const { board } = this;
    if (!board.picture) return;
    const before = this.pointers.get(event.pointerId);
    if (!before) {
      if (event.pointerType === "touch") return;
      const point = board.view.toPicture(event.offsetX, event.offsetY);
      this.showCursor(point);
      if (this.tool === "select") this.onHover(board.isInside(point) ? point : null);
      return;
    }
    const now = [event.offsetX, event.offsetY];
    if (this.pointers.size === 2) this.spread(event.pointerId, before, now);
    else if (this.action === "pan") board.view.pan(now[0] - before[0], now[1] - before[1]);
    else if (this.action === "split") this.moveSplit(board.view.toPicture(...now));
    else if (this.action) {
      for (const one of event.getCoalescedEvents?.() ?? [event]) this.follow(board.view.toPicture(one.offsetX, one.offsetY));
      this.follow(board.view.toPicture(...now));
    }
    this.pointers.set(event.pointerId, now);
    board.redraw();
  }

  // Zooms and pans with two fingers: the picture point between them stays between them.
  spread(id, before, now) {
    const [other] = [...this.pointers].filter(([key]) => key !== id).map(([, point]) => point);
    const { view } = this.board;
    view.zoom(distance(now, other) / Math.max(distance(before, other), 1), ...middle(before, other));
    view.pan((now[0] - before[0]) / 2, (now[1] - before[1]) / 2);
  }

  up(event) {
    if (!this.pointers.delete(event.pointerId) || this.pointers.size) return;
    this.end();
    if (event.pointerType === "touch") this.hideCursor();
  }

  wheel(event) {
    event.preventDefault();
    if (!this.board.picture) return;
    if (event.shiftKey) this.board.view.pan(-event.deltaY - event.deltaX, 0);
    else this.board.view.zoom(Math.exp(-event.deltaY * WHEEL * (event.ctrlKey ? 5 : 1)), event.offsetX, event.offsetY);
    this.board.redraw();
    this.onSplit();
  }

  // actions

  begin(point, isErasing = false) {
    const { board } = this;
    const erase = this.tool === "eraser" || isErasing;
    if (this.paints) {
      board.mask.add({ kind: "brush", points: [point], size: this.size, erase });
      this.action = "paint";
    } else if (this.tool === "select") {
      this.onHover(null);
      this.path = [point];
      this.isOutside = isErasing;
      this.action = "pick";
    } else {
      board.outline = { kind: this.tool, points: [point, point], erase };
      this.action = "outline";
    }
    this.showCursor(point);
  }

  follow(point) {
    const { board } = this;
    if (this.action === "paint") board.mask.extend(point);
    else if (this.action === "pick") this.drawHint(point);
    else if (this.tool === "box") board.outline.points[1] = point;
    else board.outline.points.push(point);
    this.showCursor(point);
  }

  end() {
    const { board } = this;
    if (this.action === "pick") this.pick();
    if (this.action === "outline" && board.outline) board.mask.add(board.outline);
    const painted = this.action === "paint" || this.action === "outline";
    board.outline = this.action = null;
    board.redraw();
    if (painted) this.onPainted();
  }

  // Draws a box or a loop around an object as soon as the pointer moves further than a click does.
  drawHint(point) {
    const { board, path } = this;
    path.push(point);
    const reach = Math.max(...path.map((other) => distance(other, path[0])));
    if (reach * board.view.scale < CLICK) return;
    const length = path.reduce((sum, other, at) => sum + (at ? distance(other, path[at - 1]) : 0), 0);
    const isLoop = length > LOOP * distance(path[0], point);
    board.outline = isLoop ? { kind: "lasso", points: path } : { kind: "box", points: [path[0], point] };
  }

  pick() {
    const { board, path } = this;
    if (board.outline) this.onPick(cornersOf(board.outline), this.isOutside);
    else if (board.isInside(path[0])) this.onPick([path[0]], this.isOutside);
  }

  moveSplit([x]) {
    this.action = "split";
    this.board.split = Math.min(Math.max(x / this.board.picture.width, 0), 1);
    this.onSplit();
  }

  showCursor([x, y]) {
    this.board.cursor = this.tool === "hand" ? null : { x, y, size: this.paints ? this.size : 0 };
    this.board.redraw();
  }

  leave() {
    this.hideCursor();
    this.onHover(null);
  }

  hideCursor() {
    this.board.cursor = null;
    this.board.redraw();
  }

  // keyboard: arrow keys move the brush, the space bar puts it down and lifts it

  key(event) {
    const { board } = this;
    if (!board.picture || event.ctrlKey || event.metaKey) return;
    if (event.key in KEYS) this.step(KEYS[event.key], event.shiftKey ? 4 : 1);
    else if ((event.key === " " || event.key === "Enter") && this.tool === "select" && board.mode === "mask") this.pressPick(event.altKey);
    else if (event.key === " " && board.mode === "mask" && this.tool !== "hand") this.press();
    else if (event.key === "Escape" && this.action) this.lift();
    else return;
    event.preventDefault();
  }

  step([x, y], times) {
    const { board } = this;
    const by = (times * Math.min(board.picture.width, board.picture.height)) / 40;
    if (board.mode === "compare") return this.moveSplitBy((x * times) / 40);
    if (this.tool === "hand" || board.mode === "partial") board.view.pan(-x * by * board.view.scale, -y * by * board.view.scale);
    else {
      const { width, height } = board.picture;
      const from = board.cursor ?? { x: width / 2, y: height / 2 };
      const point = [Math.min(Math.max(from.x + x * by, 0), width), Math.min(Math.max(from.y + y * by, 0), height)];
      if (this.action) this.follow(point);
      else this.showCursor(point);
    }
    board.redraw();
  }

  moveSplitBy(share) {
    this.moveSplit([(this.board.split + share) * this.board.picture.width]);
    this.action = null;
    this.board.redraw();
  }

  press() {
    if (this.action) return this.lift();
    this.begin(this.crosshair);
  }

  pressPick(isOutside) {
    this.showCursor(this.crosshair);
    this.onPick([this.crosshair], isOutside);
  }

  get crosshair() {
    const { width, height } = this.board.picture;
    const { x, y } = this.board.cursor ?? { x: width / 2, y: height / 2 };
    return [x, y];
  }

  lift() {
    if (!this.pointers.size && this.action) this.end();
  }
}

const distance = (one, other) => Math.hypot(one[0] - other[0], one[1] - other[1]);
const middle = (one, other) => [(one[0] + other[0]) / 2, (one[1] + other[1]) / 2];
