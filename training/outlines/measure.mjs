// Measures the page's outlines on pictures with known ones; measure.py writes the pictures and calls this.
// Arguments: a file of pictures (for each: width and height, 4 bytes per pixel, then 1 byte per pixel, 1 = inside), weights.
import { readFileSync } from "node:fs";
import { gunzipSync } from "node:zlib";
import { bounds, distances, regions } from "../../instgenie/server/static/select/grid.js";
import { readLayers } from "../../instgenie/server/static/select/network.js";
import { Outliner } from "../../instgenie/server/static/select/outline.js";

const [path, weights] = process.argv.slice(2);
const bytes = readFileSync(path);
const layers = readLayers(new Uint8Array(gunzipSync(readFileSync(weights))).buffer);

// The point deepest inside the largest region of `cells`, which are 1 where it may lie.
function centre(cells, width, height) {
  const { labels, sizes, values } = regions({ width, height, data: cells });
  const largest = sizes.reduce((best, size, label) => (values[label] && size > (sizes[best] ?? 0) * values[best] ? label : best), 0);
  const row = width + 2;
  const framed = new Uint8Array(row * (height + 2)).fill(1); // the border counts as outside
  for (let at = 0; at < labels.length; at++) {
    if (labels[at] === largest) framed[(Math.floor(at / width) + 1) * row + (at % width) + 1] = 0;
  }
  const depth = distances({ width: row, height: height + 2, data: framed });
  const at = depth.reduce((best, value, i) => (value > depth[best] ? i : best), 0);
  return { x: (at % row) - 0.5, y: Math.floor(at / row) - 0.5 };
}

function drawn({ window, width, height, data }, wide, high) {
  const made = new Uint8Array(wide * high);
  for (let y = 0, at = 0; y < high; y++) {
    for (let x = 0; x < wide; x++, at++) {
      const u = Math.floor(((x + 0.5 - window.x) / window.width) * width);
      const v = Math.floor(((y + 0.5 - window.y) / window.height) * height);
      made[at] = u >= 0 && v >= 0 && u < width && v < height ? data[v * width + u] : 0;
    }
  }
  return made;
}

function overlap(one, other) {
  let [both, either] = [0, 0];
  for (let at = 0; at < one.length; at++) {
    both += one[at] & other[at];
    either += one[at] | other[at];
  }
  return both / either;
}

function boxAround(target, width, height) {
  const box = bounds({ width, height, data: target });
  const [left, top] = [box.x * width, box.y * height];
  const [right, bottom] = [left + box.width * width, top + box.height * height];
  return [[left, top], [right, top], [right, bottom], [left, bottom]];
}

const scores = { clicks: [[], [], [], [], []], box: [], milliseconds: [] };
for (let at = 0; at < bytes.length; ) {
  const [width, height] = [bytes.readUInt32LE(at), bytes.readUInt32LE(at + 4)];
  const size = width * height;
  const data = bytes.subarray(at + 8, at + 8 + 4 * size);
  const target = bytes.subarray(at + 8 + 4 * size, (at += 8 + 5 * size));
  const outliner = new Outliner(layers, { width, height, data });
  const clicks = [{ ...centre(target, width, height), inside: true }];
  let outline = null;
  for (const some of scores.clicks) {
    const start = performance.now();
    outline = outliner.find(clicks, null, outline);
    scores.milliseconds.push(performance.now() - start);
    const found = drawn(outline, width, height);
    some.push(overlap(found, target));
    const wrong = target.map((value, i) => value ^ found[i]);
    if (!wrong.includes(1)) continue;
    const next = centre(wrong, width, height);
    clicks.push({ ...next, inside: target[Math.floor(next.y) * width + Math.floor(next.x)] === 1 });
  }
  const boxed = outliner.find([], boxAround(target, width, height));
  scores.box.push(overlap(drawn(boxed, width, height), target));
}
process.stdout.write(JSON.stringify(scores));
