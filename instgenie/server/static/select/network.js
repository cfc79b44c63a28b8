// A small U-Net in plain JavaScript: from a picture, maps of clicks and the outline before to the share of the object in
// each pixel. training/outlines/network.py trains it. Planes are Float32Arrays, one after another; sides are multiples of 16.

export const INPUTS = 11;
const WIDTHS = [24, 48, 80, 112];
const DOWN = [1, 2, 3, 4]; // blocks of each width on the way down
const UP = [2, 2, 2];

// The kinds of layers: every output from 3 × 3 cells of every input; each from those of one input; each from one cell of every input.
const dense = (inputs, outputs) => ({ kind: "dense", inputs, outputs, size: 9 * inputs });
const depthwise = (channels) => ({ kind: "depthwise", inputs: channels, outputs: channels, size: 9 });
const pointwise = (inputs, outputs) => ({ kind: "pointwise", inputs, outputs, size: inputs });

function shapes() {
  const block = (width) => [depthwise(width), pointwise(width, width)];
  const blocks = (width, count) => Array.from({ length: count }, () => block(width)).flat();
  const made = [dense(INPUTS, WIDTHS[0]), ...blocks(WIDTHS[0], DOWN[0])];
  for (let level = 1; level < WIDTHS.length; level++) {
    made.push(depthwise(WIDTHS[level - 1]), pointwise(WIDTHS[level - 1], WIDTHS[level]), ...blocks(WIDTHS[level], DOWN[level]));
  }
  for (let level = WIDTHS.length - 2; level >= 0; level--) {
    made.push(pointwise(WIDTHS[level + 1], WIDTHS[level]), ...blocks(WIDTHS[level], UP[level]));
  }
  return [...made, dense(WIDTHS[0], 1)];
}

// Weights in the order in which layers run. Scales and biases are the upper halves of floats, kernels are bytes.
export function readLayers(buffer) {
  let at = 0;
  const floats = (count) => {
    const halves = new Uint16Array(buffer.slice(at, (at += 2 * count)));
    return new Float32Array(Uint32Array.from(halves, (half) => half << 16).buffer);
  };
  const layers = shapes().map((shape) => {
    const [scales, biases] = [floats(shape.outputs), floats(shape.outputs)];
    const bytes = new Int8Array(buffer.slice(at, (at += shape.outputs * shape.size)));
    return { ...shape, biases, weights: Float32Array.from(bytes, (byte, i) => byte * scales[Math.floor(i / shape.size)]) };
  });
  if (at !== buffer.byteLength) throw new Error(`the weights have ${buffer.byteLength} bytes: ${at} are expected`);
  return layers;
}

// Returns logits at half the size: {width, height, data}.
export function run(layers, inputs, width, height) {
  let next = 0;
  const layer = (x, stride = 1) => {
    const { kind } = layers[next];
    return kind === "pointwise" ? mixed(x, layers[next++]) : convolved(x, layers[next++], stride);
  };
  const block = (x) => rectified(layer(rectified(layer(x))), x);
  const blocks = (x, count) => Array.from({ length: count }).reduce(block, x);
  const levels = [blocks(rectified(layer({ width, height, data: inputs }, 2)), DOWN[0])];
  for (const count of DOWN.slice(1)) levels.push(blocks(rectified(layer(rectified(layer(levels.at(-1), 2)))), count));
  let x = levels.pop();
  for (const count of UP.toReversed()) x = blocks(rectified(doubled(layer(x)), levels.pop()), count);
  return layer(x);
}

function convolved({ width, height, data }, { kind, inputs, outputs, weights, biases }, stride) {
  const padded = withBorder(data, inputs, width, height);
  const size = width * height;
  const isEmpty = Array.from({ length: inputs }, (_, input) => data.subarray(input * size, (input + 1) * size).every((value) => value === 0));
  const row = width + 2;
  const [wide, high] = [width / stride, height / stride];
  const made = new Float32Array(outputs * wide * high);
  for (let output = 0; output < outputs; output++) {
    const plane = made.subarray(output * wide * high, (output + 1) * wide * high).fill(biases[output]);
    const [first, last] = kind === "dense" ? [0, inputs] : [output, output + 1];
    for (let input = first; input < last; input++) {
      if (isEmpty[input]) continue;
      const from = input * row * (height + 2);
      accumulate(plane, wide, high, padded, from, row, stride, weights, ((kind === "dense" ? output * inputs : 0) + input) * 9);
    }
  }
  return { width: wide, height: high, data: made };
}

// The innermost loop: adds one 3 × 3 product. Everything is a local number, which makes it several times as fast.
function accumulate(plane, wide, high, data, from, row, stride, weights, w) {
  const [a, b, c] = [weights[w], weights[w + 1], weights[w + 2]];
  const [d, e, f] = [weights[w + 3], weights[w + 4], weights[w + 5]];
  const [g, h, i] = [weights[w + 6], weights[w + 7], weights[w + 8]];
  let to = 0;
  for (let y = 0; y < high; y++) {
    let at = from + y * stride * row;
    for (let x = 0; x < wide; x++, at += stride, to++) {
      plane[to] +=
        a * data[at] + b * data[at + 1] + c * data[at + 2] +
        d * data[at + row] + e * data[at + row + 1] + f * data[at + row + 2] +
        g * data[at + 2 * row] + h * data[at + 2 * row + 1] + i * data[at + 2 * row + 2];
    }
  }
}

// Each output is a sum of the inputs at the same cell. Four inputs and four outputs at a time: a number that is read or
// written takes part in four products. The widths are multiples of four.
function mixed({ width, height, data }, { inputs, outputs, weights, biases }) {
  const size = width * height;
  const made = new Float32Array(outputs * size);
  for (let output = 0; output < outputs; output++) made.fill(biases[output], output * size, (output + 1) * size);
  for (let output = 0; output < outputs; output += 4) {
    for (let input = 0; input < inputs; input += 4) {
      addProducts(made, output * size, data, input * size, size, weights, output * inputs + input, inputs);
    }
  }
  return { width, height, data: made };
}

function addProducts(made, to, data, from, size, weights, w, row) {
  const [a, b, c, d] = [weights[w], weights[w + 1], weights[w + 2], weights[w + 3]];
  const [e, f, g, h] = [weights[w + row], weights[w + row + 1], weights[w + row + 2], weights[w + row + 3]];
  w += 2 * row;
  const [i, j, k, l] = [weights[w], weights[w + 1], weights[w + 2], weights[w + 3]];
  const [m, n, o, p] = [weights[w + row], weights[w + row + 1], weights[w + row + 2], weights[w + row + 3]];
  for (let at = 0; at < size; at++, from++, to++) {
    const x = data[from];
    const y = data[from + size];
    const z = data[from + 2 * size];
    const u = data[from + 3 * size];
    made[to] += a * x + b * y + c * z + d * u;
    made[to + size] += e * x + f * y + g * z + h * u;
    made[to + 2 * size] += i * x + j * y + k * z + l * u;
    made[to + 3 * size] += m * x + n * y + o * z + p * u;
  }
}

// Adds the other grid, if there is one, and takes away what is below 0; changes the first.
function rectified(grid, other = null) {
  const { data } = grid;
  if (other) for (let at = 0; at < data.length; at++) data[at] += other.data[at];
  for (let at = 0; at < data.length; at++) if (data[at] < 0) data[at] = 0;
  return grid;
}

function withBorder(data, planes, width, height) {
  const padded = new Float32Array(planes * (width + 2) * (height + 2));
  for (let line = 0; line < planes * height; line++) {
    const to = (line + 1 + 2 * Math.floor(line / height)) * (width + 2) + 1;
    padded.set(data.subarray(line * width, (line + 1) * width), to);
  }
  return padded;
}

// Each cell becomes two by two.
function doubled({ width, height, data }) {
  const [wide, high] = [2 * width, 2 * height];
  const made = new Float32Array(4 * data.length);
  for (let line = 0; line < made.length / wide; line++) {
    const from = (Math.floor(line / high) * height + ((line % high) >> 1)) * width;
    for (let x = 0; x < wide; x++) made[line * wide + x] = data[from + (x >> 1)];
  }
  return { width: wide, height: high, data: made };
}
