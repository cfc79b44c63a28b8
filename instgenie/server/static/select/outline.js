// Finds the outline of an object from clicks and a rough box or loop: looks at the whole picture, then closer, then
// follows the edges of the picture. Pure: runs in a worker of the page and under Node.
import { alongEdges } from "./edges.js";
import { blurred, bounds, regions, scaled } from "./grid.js";
import { INPUTS, run } from "./network.js";
import { refined } from "./refine.js";

const SIDE = 128; // longer side of what the network sees
const NEAR = 4; // cells: radius of a click
const FAR = 32; // cells: reach of a click
const COLOUR = 0.12; // distance of colours that are alike
const REACH = 12; // cells around a click that go with it
const SURE = 1; // logit of a click's own cell at least
const COARSE = 192; // longer side of the grid on which edges are fitted
const FINE = 512; // longer side of the outline's grid
const MARGIN = 0.3; // around the object, as a share of its size, when looking closer
const CLOSER = 0.6; // looks closer if that shows at most this share of the picture
const SMALLEST = 0.1; // share of the picture's side that is looked at
const STRAY = 0.08; // regions below this share of the largest one are dropped, holes of that size filled

export class Outliner {
  // `picture` is {width, height, data} with four bytes per pixel, as of a canvas.
  constructor(layers, picture) {
    Object.assign(this, { layers, picture });
    this.whole = { x: 0, y: 0, width: picture.width, height: picture.height };
    this.overview = this.sample(this.whole, ...sidesOf(this.whole, SIDE, 16)); // every first look begins with it
  }

  // Returns {window, width, height, data}: data is 1 inside, window is where the grid lies in the picture.
  // `clicks` are [{x, y, inside}] and `hint` a polygon [[x, y], ...] or null, in pixels of the picture. `before` is what
  // was returned for all clicks but the last one; the outline changes around the last click only.
  find(clicks, hint = null, before = null) {
    if (before) return this.further(clicks, hint, before);
    const start = hint ? this.around(boxOf(hint), clicks) : this.whole;
    const seen = this.look(start, clicks, hint, null);
    const first = { window: start, ...cleaned(seen, start, clicks) };
    const box = boxIn(first);
    const closer = box ? this.around(box, clicks) : start;
    const isCloser = closer.width * closer.height < start.width * start.height;
    const [window, shares] = isCloser ? [closer, this.look(closer, clicks, hint, first)] : [start, seen];
    return { window, ...cleaned(this.fitted(shares, window), window, clicks) };
  }

  // The outline before, changed around the last click. An earlier click that a later one overruled no longer counts.
  further(clicks, hint, before) {
    const last = clicks.at(-1);
    const counted = clicks.filter((click) => click === last || agrees(click, before));
    const window = this.around(boxIn(before) ?? before.window, counted);
    const shares = this.fitted(this.look(window, counted, hint, before), window);
    const same = drawn(before, window, shares.width, shares.height);
    const made = refined(shares, same, { cell: cellOf(last, window, shares), inside: last.inside });
    return { window, ...cleaned(made, window, counted.filter((click) => agrees(click, { window, ...made }))) };
  }

  // The share of the object in each cell.
  look(window, clicks, hint, before) {
    const { width, height, data, touches } = this.logits(window, clicks, hint, before);
    clicks.forEach(({ inside }, i) => obey(data, inside ? SURE : -SURE, touches[i]));
    return { width, height, data: data.map((logit) => 1 / (1 + Math.exp(-logit))) };
  }

  // What the network says of each cell, and which cells go with each click.
  logits(window, clicks, hint, before) {
    const [width, height] = sidesOf(window, SIDE, 16);
    const size = width * height;
    const inputs = new Float32Array(INPUTS * size);
    const colours = window === this.whole ? this.overview : this.sample(window, width, height);
    colours.forEach(({ data }, plane) => inputs.set(data.map((value) => value - 0.5), plane * size));
    const smooth = colours.map((plane) => blurred(plane, 1).data);
    const touches = clicks.map((click) => {
      const [x, y] = [((click.x - window.x) / window.width) * width - 0.5, ((click.y - window.y) / window.height) * height - 0.5];
      const planes = inputs.subarray((click.inside ? 3 : 6) * size, (click.inside ? 6 : 9) * size);
      return drawClick(planes, x, y, colours.map(({ data }) => data), smooth, width, height);
    });
    if (hint) inputs.set(filled(hint, window, width, height), 9 * size);
    if (before) inputs.set(drawn(before, window, width, height).data, 10 * size);
    return { ...scaled(run(this.layers, inputs, width, height), width, height), touches };
  }

  // Red, green and blue of the window in cells of a grid, from 0 to 1: the mean of the pixels of each cell.
  sample(window, width, height) {
    const { data, width: row } = this.picture;
    const planes = [0, 1, 2].map(() => ({ width, height, data: new Float32Array(width * height) }));
    const [reds, greens, blues] = planes.map((plane) => plane.data);
    const columns = edgesOf(window.x, window.width, width, row);
    const lines = edgesOf(window.y, window.height, height, this.picture.height);
    for (let y = 0, at = 0; y < height; y++) {
      const [top, bottom] = [lines.first[y], lines.last[y]];
      for (let x = 0; x < width; x++, at++) {
        const [left, right] = [columns.first[x], columns.last[x]];
        let red = 0;
        let green = 0;
        let blue = 0;
        for (let line = top; line < bottom; line++) {
          for (let pixel = 4 * (line * row + left), end = 4 * (line * row + right); pixel < end; pixel += 4) {
            red += data[pixel];
            green += data[pixel + 1];
            blue += data[pixel + 2];
          }
        }
        const count = 255 * (bottom - top) * (right - left);
        reds[at] = red / count;
        greens[at] = green / count;
        blues[at] = blue / count;
      }
    }
    return planes;
  }

  // A box and all clicks inside, with a margin; the whole picture if that is not much larger.
  around(box, clicks) {
    const { width: wide, height: high } = this.picture;
    const points = clicks.filter(({ inside }) => inside);
    const left = Math.min(box.x, ...points.map(({ x }) => x));
    const top = Math.min(box.y, ...points.map(({ y }) => y));
    const right = Math.max(box.x + box.width, ...points.map(({ x }) => x));
    const bottom = Math.max(box.y + box.height, ...points.map(({ y }) => y));
    const [x, width] = spread(left, right, wide);
    const [y, height] = spread(top, bottom, high);
    return width * height < CLOSER * wide * high ? { x, y, width, height } : this.whole;
  }

  // The shares in the cells of a fine grid, along the edges of the picture.
  fitted(shares, window) {
    const [wide, high] = sidesOf(window, COARSE, 1);
    const [width, height] = sidesOf(window, FINE, 1);
    return alongEdges(scaled(shares, wide, high), this.sample(window, wide, high), this.sample(window, width, height));
  }
}

// The number of the cell at a point of the picture, -1 outside of the window.
function cellOf({ x, y }, window, { width, height }) {
  const column = Math.floor(((x - window.x) / window.width) * width);
  const row = Math.floor(((y - window.y) / window.height) * height);
  return column < 0 || row < 0 || column >= width || row >= height ? -1 : row * width + column;
}

// Does a click lie inside the outline if it is to, and outside if it is not to?
function agrees(click, { window, width, height, data }) {
  const at = cellOf(click, window, { width, height });
  return (at >= 0 && data[at] === 1) === click.inside;
}

// An outline in the cells of another window.
function drawn({ window: from, width, height, data }, window, wide, high) {
  const middles = (start, length, count) => Array.from({ length: count }, (_, at) => start + ((at + 0.5) * length) / count);
  const xs = middles(window.x, window.width, wide);
  const made = new Uint8Array(wide * high);
  middles(window.y, window.height, high).forEach((y, row) => {
    xs.forEach((x, column) => {
      const at = cellOf({ x, y }, from, { width, height });
      made[row * wide + column] = at >= 0 ? data[at] : 0;
    });
  });
  return { width: wide, height: high, data: made };
}

function sidesOf({ width, height }, longest, multiple) {
  const scale = longest / Math.max(width, height);
  return [width, height].map((side) => Math.max(Math.round((side * scale) / multiple), 1) * multiple);
}

// First pixel of each cell and the one after its last; at least one pixel.
function edgesOf(start, length, count, limit) {
  const [first, last] = [new Int32Array(count), new Int32Array(count)];
  for (let at = 0; at < count; at++) {
    first[at] = Math.min(Math.max(Math.floor(start + (at * length) / count), 0), limit - 1);
    last[at] = Math.min(Math.max(Math.floor(start + ((at + 1) * length) / count), first[at] + 1), limit);
  }
  return { first, last };
}

// The rectangle of an outline in pixels of the picture; null if the outline is empty.
function boxIn({ window, ...mask }) {
  const box = bounds(mask);
  if (!box) return null;
  const { x, y, width, height } = window;
  return { x: x + box.x * width, y: y + box.y * height, width: box.width * width, height: box.height * height };
}

// The rectangle of a polygon.
function boxOf(points) {
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const [x, y] = [Math.min(...xs), Math.min(...ys)];
  return { x, y, width: Math.max(...xs) - x, height: Math.max(...ys) - y };
}

function spread(first, last, limit) {
  const length = Math.min(Math.max((last - first) * (1 + 2 * MARGIN), SMALLEST * limit), limit);
  const start = Math.min(Math.max((first + last - length) / 2, 0), limit - length);
  return [start, length];
}

// Moves the logits around a click towards `wanted` if they contradict it.
function obey(logits, wanted, { at, touch }) {
  const lacking = wanted - logits[at];
  if (lacking * wanted > 0) for (let i = 0; i < logits.length; i++) logits[i] += lacking * touch[i];
}

// Draws the maps of a click. Returns its cell and how far each other cell goes with it: by nearness and colour.
function drawClick(planes, x, y, colours, smooth, width, height) {
  const size = width * height;
  const [column, row] = [Math.round(x), Math.round(y)].map((at, i) => Math.min(Math.max(at, 0), [width, height][i] - 1));
  const [red, green, blue] = smooth.map((plane) => plane[row * width + column]);
  const touch = new Float32Array(size);
  for (let v = 0, at = 0; v < height; v++) {
    for (let u = 0; u < width; u++, at++) {
      const squared = (u - x) ** 2 + (v - y) ** 2;
      const apart = (colours[0][at] - red) ** 2 + (colours[1][at] - green) ** 2 + (colours[2][at] - blue) ** 2;
      planes[at] = Math.max(planes[at], Math.exp(-squared / (2 * NEAR * NEAR)));
      planes[size + at] = Math.max(planes[size + at], Math.exp(-Math.sqrt(squared) / FAR));
      planes[2 * size + at] = Math.max(planes[2 * size + at], Math.exp(-apart / (2 * COLOUR * COLOUR)));
      touch[at] = Math.exp(-squared / (2 * REACH * REACH) - apart / (4 * COLOUR * COLOUR));
    }
  }
  touch[row * width + column] = 1;
  return { at: row * width + column, touch };
}

// 1 where the middle of a cell lies inside the polygon.
function filled(points, window, width, height) {
  const made = new Float32Array(width * height);
  const corners = points.map(([x, y]) => [((x - window.x) / window.width) * width, ((y - window.y) / window.height) * height]);
  for (let y = 0; y < height; y++) {
    const crossings = [];
    corners.forEach(([x1, y1], i) => {
      const [x0, y0] = corners.at(i - 1);
      if (y0 <= y + 0.5 !== y1 <= y + 0.5) crossings.push(x0 + ((y + 0.5 - y0) * (x1 - x0)) / (y1 - y0));
    });
    crossings.sort((one, other) => one - other);
    for (let i = 0; i + 1 < crossings.length; i += 2) {
      for (let x = Math.max(Math.ceil(crossings[i] - 0.5), 0); x < Math.min(crossings[i + 1] - 0.5, width); x++) made[y * width + x] = 1;
    }
  }
  return made;
}

// Cells inside: more than half, and at each click inside. Drops stray regions without a click and fills small holes.
function cleaned({ width, height, data }, window, clicks) {
  const cellsOf = (some) => some.map((click) => cellOf(click, window, { width, height })).filter((at) => at >= 0);
  const wanted = cellsOf(clicks.filter(({ inside }) => inside));
  const unwanted = cellsOf(clicks.filter(({ inside }) => !inside));
  const mask = { width, height, data: new Uint8Array(width * height) };
  for (let at = 0; at < data.length; at++) mask.data[at] = data[at] > 0.5 ? 1 : 0;
  for (const at of wanted) mask.data[at] = 1;
  const { labels, sizes, values } = regions(mask);
  const largest = sizes.reduce((most, size, label) => Math.max(most, size * values[label]), 0);
  const kept = new Set(wanted.map((at) => labels[at]));
  const open = new Set(unwanted.map((at) => labels[at]));
  const isInside = Uint8Array.from(sizes, (size, label) => {
    if (kept.has(label)) return 1;
    if (open.has(label)) return 0;
    return size >= STRAY * largest ? values[label] : 1 - values[label];
  });
  for (let at = 0; at < labels.length; at++) mask.data[at] = isInside[labels[at]];
  return mask;
}
