// Grids of numbers, {width, height, data} with one value per cell: scaling, regions, distances. Knows no picture.

// Scales with linear interpolation between the middles of cells.
export function scaled({ width, height, data }, wide, high) {
  const made = new Float32Array(wide * high);
  const columns = between(width, wide);
  const rows = between(height, high);
  for (let y = 0, to = 0; y < high; y++) {
    const [top, bottom, down] = [rows.first[y] * width, rows.second[y] * width, rows.share[y]];
    for (let x = 0; x < wide; x++, to++) {
      const left = columns.first[x];
      const right = columns.second[x];
      const across = columns.share[x];
      const upper = data[top + left] + across * (data[top + right] - data[top + left]);
      const lower = data[bottom + left] + across * (data[bottom + right] - data[bottom + left]);
      made[to] = upper + down * (lower - upper);
    }
  }
  return { width: wide, height: high, data: made };
}

// For each of `count` new cells: the two old ones between whose middles its own lies, and how far it is from the first.
function between(length, count) {
  const [first, second, share] = [new Int32Array(count), new Int32Array(count), new Float32Array(count)];
  for (let at = 0; at < count; at++) {
    const place = Math.min(Math.max(((at + 0.5) * length) / count - 0.5, 0), length - 1);
    first[at] = Math.floor(place);
    second[at] = Math.min(first[at] + 1, length - 1);
    share[at] = place - first[at];
  }
  return { first, second, share };
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
    let sum = 0;
    let cells = 0;
    for (let at = 0; at < Math.min(radius, length); at++, cells++) sum += data[start + at * step];
    for (let at = 0; at < length; at++) {
      if (at + radius < length) {
        sum += data[start + (at + radius) * step];
        cells++;
      }
      if (at > radius) {
        sum -= data[start + (at - radius - 1) * step];
        cells--;
      }
      made[start + at * step] = sum / cells;
    }
  }
  return made;
}

// The cells that are connected with the first one. `enters` says whether a neighbour joins them, and says so once.
export function connected(first, { width, height }, enters) {
  const found = [first];
  for (let next = 0; next < found.length; next++) {
    const at = found[next];
    const x = at % width;
    if (x > 0 && enters(at - 1)) found.push(at - 1);
    if (x < width - 1 && enters(at + 1)) found.push(at + 1);
    if (at >= width && enters(at - width)) found.push(at - width);
    if (at < width * (height - 1) && enters(at + width)) found.push(at + width);
  }
  return found;
}

// Numbers connected regions of equal values: {labels, sizes, values}, by label.
export function regions(grid) {
  const { data } = grid;
  const labels = new Int32Array(data.length).fill(-1);
  const [sizes, values] = [[], []];
  for (let first = 0; first < labels.length; first++) {
    if (labels[first] >= 0) continue;
    const label = sizes.length;
    labels[first] = label;
    const enters = (at) => {
      if (labels[at] >= 0 || data[at] !== data[first]) return false;
      labels[at] = label;
      return true;
    };
    sizes.push(connected(first, grid, enters).length);
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
