// Measures the page's outlines on pictures with known ones; measure.py writes the pictures and calls this.
// Arguments: a file of pictures (for each: 4 bytes per pixel, then 1 byte per pixel, 1 = inside), side, weights.
import { readFileSync } from "node:fs";
import { gunzipSync } from "node:zlib";
import { distances, regions } from "../../instgenie/server/static/select/grid.js";
import { readLayers } from "../../instgenie/server/static/select/network.js";
import { Outliner } from "../../instgenie/server/static/select/outline.js";

const [path, sideText, weights] = process.argv.slice(2);
const side = Number(sideText);
const bytes = readFileSync(path);
const layers = readLayers(new Uint8Array(gunzipSync(readFileSync(weights))).buffer);

// The point deepest inside the largest region of `cells`, which are 1 where it may lie.
function centre(cells) {
  const { labels, sizes, values } = regions({ width: side, height: side, data: cells });
  const largest = sizes.reduce((best, size, label) => (values[label] && size > (sizes[best] ?? 0) * values[best] ? label : best), 0);
  const framed = new Uint8Array((side + 2) ** 2).fill(1); // the border counts as outside
  for (let at = 0; at < labels.length; at++) {
    if (labels[at] === largest) framed[(Math.floor(at / side) + 1) * (side + 2) + (at % side) + 1] = 0;
  }
  const depth = distances({ width: side + 2, height: side + 2, data: framed });
  const at = depth.reduce((best, value, i) => (value > depth[best] ? i : best), 0);
  return { x: (at % (side + 2)) - 0.5, y: Math.floor(at / (side + 2)) - 0.5 };
}

function drawn({ window, width, height, data }) {
  const made = new Uint8Array(side * side);
  for (let y = 0, at = 0; y < side; y++) {
    for (let x = 0; x < side; x++, at++) {
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

function boxAround(target) {
  let [left, top, right, bottom] = [side, side, 0, 0];
  target.forEach((value, at) => {
    if (!value) return;
    [left, right] = [Math.min(left, at % side), Math.max(right, (at % side) + 1)];
    [top, bottom] = [Math.min(top, Math.floor(at / side)), Math.max(bottom, Math.floor(at / side) + 1)];
  });
  return [[left, top], [right, top], [right, bottom], [left, bottom]];
}

const size = side * side;
const scores = { clicks: [[], [], [], [], []], box: [], milliseconds: [] };
for (let at = 0; at < bytes.length; at += 5 * size) {
  const outliner = new Outliner(layers, { width: side, height: side, data: bytes.subarray(at, at + 4 * size) });
  const target = bytes.subarray(at + 4 * size, at + 5 * size);
  const clicks = [{ ...centre(target), inside: true }];
  for (const some of scores.clicks) {
    const start = performance.now();
    const found = drawn(outliner.find(clicks));
    scores.milliseconds.push(performance.now() - start);
    some.push(overlap(found, target));
    const wrong = target.map((value, i) => value ^ found[i]);
    if (!wrong.includes(1)) continue;
    const next = centre(wrong);
    clicks.push({ ...next, inside: target[Math.floor(next.y) * side + Math.floor(next.x)] === 1 });
  }
  scores.box.push(overlap(drawn(outliner.find([], boxAround(target))), target));
}
process.stdout.write(JSON.stringify(scores));
