// The mask: a canvas of bounded size, and the strokes that made it, so that they can be undone and redone.
// Coordinates are pixels of the picture.

const MAX_SIDE = 1024;
const MAX_UNDO = 60; // older strokes can no longer be undone
const SAMPLE = 128; // side of the small copy in which masked pixels are counted

export class Mask {
  constructor(width, height) {
    this.scale = Math.min(1, MAX_SIDE / Math.max(width, height));
    this.canvas = canvasOf(width * this.scale, height * this.scale);
    this.base = canvasOf(this.canvas.width, this.canvas.height); // strokes that can no longer be undone
    this.context = contextOf(this.canvas, this.scale);
    this.sample = canvasOf(SAMPLE, SAMPLE).getContext("2d", { willReadFrequently: true });
    this.strokes = [];
    this.undone = [];
  }

  add(stroke) {
    this.strokes.push(stroke);
    this.undone = [];
    this.paintLast();
    if (this.strokes.length > MAX_UNDO) this.settle();
  }

  // Appends a point to the last stroke.
  extend(point) {
    const { points, size, erase } = this.strokes.at(-1);
    this.paint({ kind: "brush", points: [points.at(-1), point], size, erase });
    points.push(point);
  }

  undo() {
    if (this.strokes.length) this.undone.push(this.strokes.pop());
    this.repaint();
  }

  redo() {
    if (!this.undone.length) return;
    this.strokes.push(this.undone.pop());
    this.paintLast();
  }

  // A second outline of the same object takes the place of the first.
  paintLast() {
    if (isReplaced(this.strokes, this.strokes.length - 2)) this.repaint();
    else this.paint(this.strokes.at(-1));
  }

  settle() {
    const { canvas } = this;
    const later = this.strokes.splice(1);
    if (!isReplaced([...this.strokes, ...later], 0)) {
      this.repaint();
      const base = this.base.getContext("2d");
      base.clearRect(0, 0, canvas.width, canvas.height);
      base.drawImage(canvas, 0, 0);
    }
    this.strokes = later;
    this.repaint();
  }

  repaint() {
    this.clear();
    this.whole((context) => context.drawImage(this.base, 0, 0));
    const first = this.strokes.findLastIndex(({ kind }) => kind === "pixels" || kind === "clear"); // hides all before it
    this.strokes.forEach((stroke, at) => {
      if (at >= first && !isReplaced(this.strokes, at)) this.paint(stroke);
    });
  }

  paint(stroke) {
    const { context } = this;
    context.globalCompositeOperation = stroke.erase ? "destination-out" : "source-over";
    KINDS[stroke.kind](this, stroke);
    context.globalCompositeOperation = "source-over";
  }

  clear() {
    this.whole((context, { width, height }) => context.clearRect(0, 0, width, height));
  }

  // Calls `draw` with coordinates in pixels of the mask's canvas.
  whole(draw) {
    this.context.save();
    this.context.setTransform(1, 0, 0, 1, 0, 0);
    draw(this.context, this.canvas);
    this.context.restore();
  }

  // The masked share of the picture, approximately.
  get share() {
    this.sample.clearRect(0, 0, SAMPLE, SAMPLE);
    this.sample.drawImage(this.canvas, 0, 0, SAMPLE, SAMPLE);
    const { data } = this.sample.getImageData(0, 0, SAMPLE, SAMPLE);
    let sum = 0;
    for (let at = 3; at < data.length; at += 4) sum += data[at];
    return sum / 255 / SAMPLE ** 2;
  }

  // One byte per pixel of the mask's canvas: 1 is masked.
  get pixels() {
    const { width, height } = this.canvas;
    const copy = canvasOf(width, height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(this.canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, width, height);
    const masked = new Uint8Array(width * height);
    for (let at = 0; at < masked.length; at++) masked[at] = data[4 * at + 3] >> 7;
    return masked;
  }
}

const KINDS = {
  brush({ context }, { points, size }) {
    context.lineWidth = size;
    context.beginPath();
    context.arc(...points[0], size / 2, 0, 2 * Math.PI); // a line of one point would be invisible
    context.fill();
    context.beginPath();
    for (const point of points) context.lineTo(...point);
    context.stroke();
  },
  box({ context }, { points: [[x, y], [right, bottom]] }) {
    context.fillRect(Math.min(x, right), Math.min(y, bottom), Math.abs(right - x), Math.abs(bottom - y));
  },
  lasso({ context }, { points }) {
    context.beginPath();
    for (const point of points) context.lineTo(...point);
    context.fill();
  },
  image(mask, { alpha }) {
    mask.whole((context, { width, height }) => {
      context.fillRect(0, 0, width, height);
      context.globalCompositeOperation = "destination-out"; // opaque pixels are not masked
      context.drawImage(alpha, 0, 0, width, height);
    });
  },
  outline({ context }, { window, ...grid }) {
    context.drawImage(imageOf(grid, context.fillStyle), window.x, window.y, window.width, window.height);
  },
  pixels(mask, grid) {
    mask.clear();
    mask.whole((context) => context.drawImage(imageOf(grid, context.fillStyle), 0, 0));
  },
  clear(mask) {
    mask.clear();
  },
  invert(mask) {
    mask.whole((context, { width, height }) => {
      context.globalCompositeOperation = "xor";
      context.fillRect(0, 0, width, height);
    });
  },
};

// Strokes of one session are outlines of the same object: the last one counts.
function isReplaced(strokes, at) {
  const session = strokes[at]?.session;
  return session !== undefined && session === strokes[at + 1]?.session;
}

// A canvas with the colour where the grid {width, height, data} is 1.
function imageOf({ width, height, data }, colour) {
  const context = canvasOf(width, height).getContext("2d");
  const image = context.createImageData(width, height);
  const words = new Uint32Array(image.data.buffer);
  for (let at = 0; at < data.length; at++) words[at] = data[at] ? 0xffffffff : 0;
  context.putImageData(image, 0, 0);
  context.globalCompositeOperation = "source-in";
  context.fillStyle = colour;
  context.fillRect(0, 0, width, height);
  return context.canvas;
}

function canvasOf(width, height) {
  return Object.assign(document.createElement("canvas"), { width: Math.round(width), height: Math.round(height) });
}

function contextOf(canvas, scale) {
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.lineCap = context.lineJoin = "round";
  context.fillStyle = context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--mask");
  return context;
}
