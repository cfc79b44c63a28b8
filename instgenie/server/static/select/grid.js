// Grids of numbers, {width, height, data} with one value per cell: scaling, regions, distances. Knows no picture.

// Scales with linear interpolation between the middles of cells.
export function scaled({ width, height, data }, wide, high) {
  const made = new Float32Array(wide * high);
  for (let y = 0; y < high; y++) {
    const v = Math.min(Math.max(((y + 0.5) * height) / high - 0.5, 0), height - 1);
    const [top, below] = [Math.floor(v), Math.min(Math.floor(v) + 1, height - 1)];
    for (let x = 0; x < wide; x++) {
      const u = Math.min(Math.max(((x + 0.5) * width) / wide - 0.5, 0), width - 1);
      const left = Math.floor(u);
      const right = Math.min(left + 1, width - 1);
      const upper = data[top * width + left] * (1 - u + left) + data[top * width + right] * (u - left);
      const lower = data[below * width + left] * (1 - u + left) + data[below * width + right] * (u - left);
      made[y * wide + x] = upper * (1 - v + top) + lower * (v - top);
    }
  }
  return { width: wide, height: high, data: made };
}

// The mean of each cell's square neighbourhood, cut off at the border.
export function blurred({ width, height, data }, radius) {
  const across = lines(data, width, height, 1, width, radius);
  return { width, height, data: lines(across, height, width, width, 1, radius) };
}

function lines(data, length, count, step, stride, radius) {
  const made = new Float32Array(data.length);
  for (let line = 0; line < count; line++) {
    const start = line * stride;
    let [sum, cells] = [0, 0];
    for (let at = 0; at < Math.min(radius, length); at++, cells++) sum += data[start + at * step];
    for (let at = 0; at < length; at++) {
      if (at + radius < length) [sum, cells] = [sum + data[start + (at + radius) * step], cells + 1];
      if (at > radius) [sum, cells] = [sum - data[start + (at - radius - 1) * step], cells - 1];
      made[start + at * step] = sum / cells;
    }
  }
  return made;
}

// Numbers connected regions of equal values: {labels, sizes, values}, by label.
export function regions({ width, height, data }) {
  const labels = new Int32Array(width * height).fill(-1);
  const [sizes, values] = [[], []];
  const stack = new Int32Array(width * height);
  for (let first = 0; first < labels.length; first++) {
    if (labels[first] >= 0) continue;
    const label = sizes.length;
    let [depth, size] = [1, 0];
    stack[0] = first;
    labels[first] = label;
    const visit = (next) => {
      if (labels[next] < 0 && data[next] === data[first]) {
        labels[next] = label;
        stack[depth++] = next;
      }
    };
    while (depth) {
      const at = stack[--depth];
      size++;
      const x = at % width;
      if (x > 0) visit(at - 1);
      if (x < width - 1) visit(at + 1);
      if (at >= width) visit(at - width);
      if (at < width * (height - 1)) visit(at + width);
    }
    sizes.push(size);
    values.push(data[first]);
  }
  return { labels, sizes, values };
}

// The smallest rectangle around all cells that are not 0, in shares of the sides: {x, y, width, height}, or null.
export function bounds({ width, height, data }) {
  let [left, top, right, bottom] = [width, height, -1, -1];
  for (let y = 0, at = 0; y < height; y++) {
    for (let x = 0; x < width; x++, at++) {
      if (!data[at]) continue;
      [left, right] = [Math.min(left, x), Math.max(right, x)];
      [top, bottom] = [Math.min(top, y), y];
    }
  }
  if (right < 0) return null;
  return { x: left / width, y: top / height, width: (right + 1 - left) / width, height: (bottom + 1 - top) / height };
}

// The squared distance of each cell to the nearest cell that is not 0; Infinity if there is none.
// Felzenszwalb and Huttenlocher, "Distance transforms of sampled functions": exact, in linear time.
export function distances({ width, height, data }) {
  const squared = Float64Array.from(data, (value) => (value ? 0 : 1e20));
  const longest = Math.max(width, height);
  const room = { values: new Float64Array(longest), places: new Int32Array(longest), edges: new Float64Array(longest + 1) };
  for (let x = 0; x < width; x++) transform(squared, x, width, height, room);
  for (let y = 0; y < height; y++) transform(squared, y * width, 1, width, room);
  return squared;
}

function transform(data, start, step, length, { values, places, edges }) {
  for (let at = 0; at < length; at++) values[at] = data[start + at * step];
  let last = 0;
  [places[0], edges[0], edges[1]] = [0, -1e20, 1e20];
  for (let at = 1; at < length; at++) {
    let edge;
    do {
      const place = places[last];
      edge = (values[at] + at * at - values[place] - place * place) / (2 * (at - place));
    } while (edge <= edges[last] && last-- > 0);
    last++;
    [places[last], edges[last], edges[last + 1]] = [at, edge, 1e20];
  }
  for (let at = 0, piece = 0; at < length; at++) {
    while (edges[piece + 1] < at) piece++;
    data[start + at * step] = (at - places[piece]) ** 2 + values[places[piece]];
  }
}

// Grows the cells that are not 0 by a radius in cells; a negative radius shrinks them. The border does not shrink them.
export function grown(grid, radius) {
  const { width, height, data } = grid;
  const isGrowing = radius >= 0;
  const apart = distances(isGrowing ? grid : { width, height, data: data.map((value) => (value ? 0 : 1)) });
  const reach = radius * radius;
  return { width, height, data: Uint8Array.from(apart, (distance) => (isGrowing ? distance <= reach : distance > reach) ? 1 : 0) };
}
