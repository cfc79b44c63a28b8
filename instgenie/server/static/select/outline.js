// Finds the outline of an object from clicks and a rough box or loop: looks at the whole picture, then closer, then
// follows the edges of the picture. Pure: runs in a worker of the page and under Node.
import { blurred, bounds, regions, scaled } from "./grid.js";
import { INPUTS, run } from "./network.js";

const SIDE = 96; // longer side of what the network sees
const NEAR = 3; // cells: radius of a click
const FAR = 24; // cells: reach of a click
const COLOUR = 0.12; // distance of colours that are alike
const REACH = 9; // cells around a click that go with it
const SURE = 1; // logit of a click's own cell at least
const COARSE = 192; // longer side of the grid on which edges are fitted
const FINE = 512; // longer side of the outline's grid
const MARGIN = 0.3; // around the object, as a share of its size, when looking closer
const CLOSER = 0.6; // looks closer if that shows at most this share of the picture
const SMALLEST = 0.1; // share of the picture's side that is looked at
const RADIUS = 5; // cells of the coarse grid in which colours tell inside from outside
const EVENNESS = 1e-3; // variance of colours below which there is no edge
const STRAY = 0.08; // regions below this share of the largest one are dropped, holes of that size filled

export class Outliner {
  // `picture` is {width, height, data} with four bytes per pixel, as of a canvas.
  constructor(layers, picture) {
    Object.assign(this, { layers, picture });
  }

  // Returns {window, width, height, data}: data is 1 inside, window is where the grid lies in the picture.
  // `clicks` are [{x, y, inside}] and `hint` a polygon [[x, y], ...] or null, in pixels of the picture.
  find(clicks, hint = null) {
    const { width, height } = this.picture;
    let window = { x: 0, y: 0, width, height };
    let shares = this.look(window, clicks, hint);
    const closer = this.closeUp(cleaned(shares, window, clicks), window, clicks);
    if (closer.width * closer.height < CLOSER * width * height) {
      window = closer;
      shares = this.look(window, clicks, hint);
    }
    const fine = this.fitted(shares, window);
    return { window, ...cleaned(fine, window, clicks) };
  }

  // The share of the object in each cell. A click that adds never takes away, and the other way round.
  look(window, clicks, hint) {
    const first = this.share(window, clicks.slice(0, 1), hint);
    for (let count = 2; count <= clicks.length; count++) {
      const { data } = this.share(window, clicks.slice(0, count), hint);
      const choose = clicks[count - 1].inside ? Math.max : Math.min;
      first.data.forEach((share, at) => (first.data[at] = choose(share, data[at])));
    }
    return first;
  }

  // The share of the object in each cell, by the network.
  share(window, clicks, hint) {
    const [width, height] = sidesOf(window, SIDE, 16);
    const size = width * height;
    const inputs = new Float32Array(INPUTS * size);
    const colours = this.sample(window, width, height);
    colours.forEach(({ data }, plane) => inputs.set(data.map((value) => value - 0.5), plane * size));
    const smooth = colours.map((plane) => blurred(plane, 1).data);
    const touches = clicks.map((click) => {
      const [x, y] = [((click.x - window.x) / window.width) * width - 0.5, ((click.y - window.y) / window.height) * height - 0.5];
      const planes = inputs.subarray((click.inside ? 3 : 6) * size, (click.inside ? 6 : 9) * size);
      return drawClick(planes, x, y, colours.map(({ data }) => data), smooth, width, height);
    });
    if (hint) inputs.set(filled(hint, window, width, height), 9 * size);
    const { data } = scaled(run(this.layers, inputs, width, height), width, height);
    clicks.forEach(({ inside }, i) => obey(data, inside ? SURE : -SURE, touches[i]));
    return { width, height, data: data.map((logit) => 1 / (1 + Math.exp(-logit))) };
  }

  // Red, green and blue of the window in cells of a grid, from 0 to 1: the mean of the pixels of each cell.
  sample(window, width, height) {
    const { data, width: row } = this.picture;
    const planes = [0, 1, 2].map(() => ({ width, height, data: new Float32Array(width * height) }));
    const [columns, lines] = [edgesOf(window.x, window.width, width, row), edgesOf(window.y, window.height, height, this.picture.height)];
    for (let y = 0, at = 0; y < height; y++) {
      for (let x = 0; x < width; x++, at++) {
        let [red, green, blue, count] = [0, 0, 0, 0];
        for (let line = lines[y][0]; line < lines[y][1]; line++) {
          for (let column = columns[x][0]; column < columns[x][1]; column++, count++) {
            const pixel = 4 * (line * row + column);
            red += data[pixel];
            green += data[pixel + 1];
            blue += data[pixel + 2];
          }
        }
        [planes[0].data[at], planes[1].data[at], planes[2].data[at]] = [red / count / 255, green / count / 255, blue / count / 255];
      }
    }
    return planes;
  }

  // The object's rectangle with a margin, or the window itself if there is no object.
  closeUp(mask, window, clicks) {
    const found = bounds(mask);
    if (!found) return window;
    const box = insideOf(found, window);
    const points = clicks.filter(({ inside }) => inside);
    const left = Math.min(box.x, ...points.map(({ x }) => x));
    const top = Math.min(box.y, ...points.map(({ y }) => y));
    const right = Math.max(box.x + box.width, ...points.map(({ x }) => x));
    const bottom = Math.max(box.y + box.height, ...points.map(({ y }) => y));
    const [x, width] = spread(left, right, this.picture.width);
    const [y, height] = spread(top, bottom, this.picture.height);
    return { x, y, width, height };
  }

  // Follows the edges of the picture: in each neighbourhood the share is a linear function of the colour (a guided filter,
  // He, Sun and Tang), fitted on a coarse grid and evaluated on a fine one.
  fitted(shares, window) {
    const [wide, high] = sidesOf(window, COARSE, 1);
    const guide = this.sample(window, wide, high);
    const factors = linear(guide, scaled(shares, wide, high));
    const [width, height] = sidesOf(window, FINE, 1);
    const [red, green, blue] = this.sample(window, width, height);
    const [a, b, c, d] = factors.map((factor) => scaled(blurred(factor, RADIUS), width, height).data);
    const data = d.map((value, at) => value + a[at] * red.data[at] + b[at] * green.data[at] + c[at] * blue.data[at]);
    return { width, height, data };
  }
}

function sidesOf({ width, height }, longest, multiple) {
  const scale = longest / Math.max(width, height);
  return [width, height].map((side) => Math.max(Math.round((side * scale) / multiple), 1) * multiple);
}

// First and last pixel of each cell; at least one pixel.
function edgesOf(start, length, count, limit) {
  return Array.from({ length: count }, (_, at) => {
    const first = Math.min(Math.max(Math.floor(start + (at * length) / count), 0), limit - 1);
    return [first, Math.min(Math.max(Math.floor(start + ((at + 1) * length) / count), first + 1), limit)];
  });
}

const insideOf = (box, window) => ({
  x: window.x + box.x * window.width,
  y: window.y + box.y * window.height,
  width: box.width * window.width,
  height: box.height * window.height,
});

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

// The factors of red, green and blue, and the constant, that fit the shares best around each cell.
function linear(guide, shares) {
  const { width, height } = shares;
  const mean = (values) => blurred({ width, height, data: values }, RADIUS).data;
  const times = (one, other) => one.map((value, at) => value * other[at]);
  const planes = guide.map(({ data }) => data);
  const means = planes.map(mean);
  const share = mean(shares.data);
  const pairs = [[0, 0], [0, 1], [0, 2], [1, 1], [1, 2], [2, 2]].map(([i, j]) => {
    const product = mean(times(planes[i], planes[j]));
    return product.map((value, at) => value - means[i][at] * means[j][at] + (i === j ? EVENNESS : 0));
  });
  const together = planes.map((plane, i) => mean(times(plane, shares.data)).map((value, at) => value - means[i][at] * share[at]));
  const made = [0, 1, 2, 3].map(() => ({ width, height, data: new Float32Array(width * height) }));
  for (let at = 0; at < width * height; at++) {
    const solution = solved(pairs.map((pair) => pair[at]), together.map((plane) => plane[at]));
    let constant = share[at];
    solution.forEach((factor, i) => {
      made[i].data[at] = factor;
      constant -= factor * means[i][at];
    });
    made[3].data[at] = constant;
  }
  return made;
}

// Solves a symmetric system of three equations.
function solved([a, b, c, d, e, f], [x, y, z]) {
  const [m, n, o] = [d * f - e * e, c * e - b * f, b * e - c * d];
  const [p, q, r] = [a * f - c * c, b * c - a * e, a * d - b * b];
  const determinant = a * m + b * n + c * o;
  return [(m * x + n * y + o * z) / determinant, (n * x + p * y + q * z) / determinant, (o * x + q * y + r * z) / determinant];
}

// Cells inside: more than half, and at each click inside. Drops stray regions without a click and fills small holes.
function cleaned({ width, height, data }, window, clicks) {
  const cellOf = ({ x, y }) => {
    const [column, row] = [((x - window.x) / window.width) * width, ((y - window.y) / window.height) * height];
    if (column < 0 || row < 0 || column >= width || row >= height) return -1;
    return Math.floor(row) * width + Math.floor(column);
  };
  const wanted = clicks.filter(({ inside }) => inside).map(cellOf).filter((at) => at >= 0);
  const unwanted = clicks.filter(({ inside }) => !inside).map(cellOf).filter((at) => at >= 0);
  const mask = { width, height, data: Uint8Array.from(data, (share) => (share > 0.5 ? 1 : 0)) };
  for (const at of wanted) mask.data[at] = 1;
  const { labels, sizes, values } = regions(mask);
  const largest = Math.max(...sizes.map((size, label) => size * values[label]));
  const kept = new Set(wanted.map((at) => labels[at]));
  const open = new Set(unwanted.map((at) => labels[at]));
  const isInside = sizes.map((size, label) => {
    if (kept.has(label)) return 1;
    if (open.has(label)) return 0;
    return size >= STRAY * largest ? values[label] : 1 - values[label];
  });
  return { width, height, data: Uint8Array.from(labels, (label) => isInside[label]) };
}
