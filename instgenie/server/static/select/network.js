// A small U-Net in plain JavaScript: from a picture and maps of clicks to the share of the object in each pixel.
// training/outlines/network.py trains it. Planes are Float32Arrays, one after another; sides are multiples of 16.

export const INPUTS = 10;
const WIDTHS = [16, 24, 32, 48];

// Weights in the order in which layers run, each with its numbers of inputs and outputs.
export function readLayers(buffer) {
  const [a, b, c, d] = WIDTHS;
  const shapes = [
    [INPUTS, a], [a, b], [b, b], [b, c], [c, c], [c, c], [c, d], [d, d], [d, d], [d + c, c], [c + b, b], [b + a, a], [a, 1],
  ];
  let at = 0;
  const floats = (count) => new Float32Array(buffer.slice(at, (at += 4 * count)));
  const layers = shapes.map(([inputs, outputs]) => {
    const [scales, biases] = [floats(outputs), floats(outputs)];
    const bytes = new Int8Array(buffer, at, outputs * inputs * 9);
    at += bytes.length;
    return { inputs, outputs, biases, weights: Float32Array.from(bytes, (byte, i) => byte * scales[Math.floor(i / (inputs * 9))]) };
  });
  if (at !== buffer.byteLength) throw new Error(`the weights have ${buffer.byteLength} bytes: ${at} are expected`);
  return layers;
}

// Returns logits at half the size: {width, height, data}.
export function run(layers, inputs, width, height) {
  let next = 0;
  const unit = (x, stride = 1) => convolved(x, layers[next++], stride, true);
  const x0 = unit({ width, height, data: inputs }, 2);
  const x1 = unit(unit(x0, 2));
  const x2 = unit(unit(unit(x1, 2)));
  let x = unit(unit(unit(x2, 2)));
  for (const skip of [x2, x1, x0]) x = unit(joined(x, skip));
  return convolved(x, layers[next], 1, false);
}

function convolved({ width, height, data }, { inputs, outputs, weights, biases }, stride, isRectified) {
  const padded = withBorder(data, inputs, width, height);
  const row = width + 2;
  const [wide, high] = [width / stride, height / stride];
  const made = new Float32Array(outputs * wide * high);
  for (let output = 0; output < outputs; output++) {
    const plane = made.subarray(output * wide * high, (output + 1) * wide * high).fill(biases[output]);
    for (let input = 0; input < inputs; input++) {
      const from = input * row * (height + 2);
      accumulate(plane, wide, high, padded, from, row, stride, weights, (output * inputs + input) * 9);
    }
    if (isRectified) for (let at = 0; at < plane.length; at++) if (plane[at] < 0) plane[at] = 0;
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

function withBorder(data, planes, width, height) {
  const padded = new Float32Array(planes * (width + 2) * (height + 2));
  for (let line = 0; line < planes * height; line++) {
    const to = (line + 1 + 2 * Math.floor(line / height)) * (width + 2) + 1;
    padded.set(data.subarray(line * width, (line + 1) * width), to);
  }
  return padded;
}

// Doubles the size of the smaller one and puts the planes of the other behind its own.
function joined(small, skip) {
  const { width, height } = skip;
  const planes = small.data.length / (small.width * small.height);
  const data = new Float32Array(planes * width * height + skip.data.length);
  for (let line = 0; line < planes * height; line++) {
    const from = (Math.floor(line / height) * small.height + ((line % height) >> 1)) * small.width;
    for (let x = 0; x < width; x++) data[line * width + x] = small.data[from + (x >> 1)];
  }
  data.set(skip.data, planes * width * height);
  return { width, height, data };
}
