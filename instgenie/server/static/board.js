// Draws the picture with its mask, or the picture before and after, at most once per frame. input.js handles input.
import { View } from "./view.js";

export const FIRST_SPLIT = 0.08; // shows nearly all of the result
const MASK_ALPHA = 0.55;
const SMOOTH_BELOW = 3; // zoom factor; above it, single pixels show

export class Board {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.view = new View();
    this.picture = null;
    this.mask = null;
    this.after = null; // a bitmap: the result, or an intermediate picture
    this.mode = "mask"; // or "compare", "difference", "partial"
    this.showsOriginal = false; // for as long as the user holds the key or the button
    this.split = FIRST_SPLIT; // share of the picture's width: before on the left, after on the right
    this.outline = null; // a box or lasso being drawn: {kind, points}
    this.cursor = null; // {x, y, size} in pixels of the picture
    this.isWaiting = false;
    this.onDraw = this.onZoom = () => {}; // called after each drawing
    this.colour = getComputedStyle(document.documentElement).getPropertyValue("--mask");
    new ResizeObserver(() => this.resize()).observe(canvas);
  }

  open(picture, mask) {
    Object.assign(this, { picture, mask, after: null, mode: "mask", outline: null, cursor: null });
    this.view.picture = picture;
    this.view.fit();
    this.redraw();
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const ratio = Math.min(devicePixelRatio, 2);
    const wasFitting = Math.abs(this.view.scale - this.view.fitting) < 1e-6;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    this.view.window = { width, height };
    if (wasFitting) this.view.fit();
    this.draw();
  }

  isInside([x, y]) {
    return x >= 0 && y >= 0 && x < this.picture.width && y < this.picture.height;
  }

  redraw() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.isWaiting = false;
    const { canvas, context, view } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    if (!this.picture) return;
    const ratio = canvas.width / Math.max(view.window.width, 1);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.imageSmoothingEnabled = view.scale < SMOOTH_BELOW;
    this.place(this.mode === "partial" && this.after ? this.after : this.picture.bitmap);
    if (this.showsOriginal) return;
    if (this.mode === "compare") this.drawAfter();
    if (this.mode === "difference") this.drawDifference();
    if (this.mode === "mask") this.drawMask();
    this.onDraw();
    this.onZoom();
  }

  place(image) {
    const { view, picture } = this;
    this.context.drawImage(image, view.x, view.y, picture.width * view.scale, picture.height * view.scale);
  }

  drawMask() {
    this.context.globalAlpha = MASK_ALPHA;
    this.place(this.mask.canvas);
    this.context.globalAlpha = 1;
    if (this.outline) this.drawOutline(this.outline);
    if (this.cursor) this.drawCursor(this.cursor);
  }

  drawOutline(outline) {
    const { context, view } = this;
    context.beginPath();
    for (const point of cornersOf(outline)) context.lineTo(...view.toWindow(...point));
    context.closePath();
    this.stroke([6, 4]);
  }

  drawCursor({ x, y, size }) {
    const { context, view } = this;
    const [left, top] = view.toWindow(x, y);
    context.beginPath();
    if (size) context.arc(left, top, Math.max((size * view.scale) / 2, 2), 0, 2 * Math.PI);
    context.moveTo(left - 5, top);
    context.lineTo(left + 5, top);
    context.moveTo(left, top - 5);
    context.lineTo(left, top + 5);
    this.stroke([]);
  }

  // Strokes a white line with a dark border, which is visible on any picture.
  stroke(dashes) {
    const { context } = this;
    context.lineWidth = 3;
    context.strokeStyle = "rgb(0 0 0 / 0.5)";
    context.stroke();
    context.setLineDash(dashes);
    context.lineWidth = 1.5;
    context.strokeStyle = "#fff";
    context.stroke();
    context.setLineDash([]);
  }

  drawAfter() {
    const { context, view, picture } = this;
    const [x] = view.toWindow(this.split * picture.width, 0);
    const [top, height] = [view.y, picture.height * view.scale];
    context.save();
    context.beginPath();
    context.rect(x, top, view.window.width + Math.abs(x), height);
    context.clip();
    this.place(this.after);
    context.restore();
    context.fillStyle = "#fff";
    context.shadowColor = "rgb(0 0 0 / 0.5)";
    context.shadowBlur = 6;
    context.fillRect(x - 1, top, 2, height);
    context.beginPath();
    context.arc(x, top + height / 2, 14, 0, 2 * Math.PI);
    context.fill();
    context.shadowBlur = 0;
    this.drawArrows(x, top + height / 2);
    const before = this.labelWidth("Before");
    const left = Math.max(x - 10 - before, 4); // stays in the window
    this.drawLabel("Before", left);
    this.drawLabel("After", Math.max(x + 10, left + before + 6));
  }

  // What was changed, on black: pixels that are equal before and after are black.
  drawDifference() {
    this.context.globalCompositeOperation = "difference";
    this.place(this.after);
    this.context.globalCompositeOperation = "source-over";
  }

  labelWidth(text) {
    this.context.font = "600 12px system-ui, sans-serif";
    return this.context.measureText(text).width + 16;
  }

  drawLabel(text, left) {
    const { context, view } = this;
    const width = this.labelWidth(text);
    const top = Math.min(view.y + this.picture.height * view.scale, view.window.height) - 32;
    context.fillStyle = "rgb(0 0 0 / 0.6)";
    context.beginPath();
    context.roundRect(left, top, width, 22, 11);
    context.fill();
    context.fillStyle = "#fff";
    context.fillText(text, left + 8, top + 15);
  }

  drawArrows(x, y) {
    const { context } = this;
    context.lineWidth = 2;
    context.strokeStyle = this.colour;
    for (const side of [-1, 1]) {
      context.beginPath();
      context.moveTo(x + side * 4, y - 4);
      context.lineTo(x + side * 8, y);
      context.lineTo(x + side * 4, y + 4);
      context.stroke();
    }
  }
}

// The corners of a box or a lasso.
export function cornersOf({ kind, points }) {
  if (kind !== "box") return points;
  const [[x, y], [right, bottom]] = points;
  return [[x, y], [right, y], [right, bottom], [x, bottom]];
}
