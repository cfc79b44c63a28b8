// A worker thread for everything slow about masks: finds outlines, grows and shrinks, reads mask files.
import { grown } from "./grid.js";
import { readLayers } from "./network.js";
import { Outliner } from "./outline.js";
import { traced } from "./trace.js";

const MAX_SIDE = 1024; // of the picture that outlines are found in

const layers = fetch("/static/select/outline.weights.gz")
  .then(({ body }) => new Response(body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer())
  .then(readLayers);
let opened = null; // a promise of the outliner and of its scale

const ACTS = {
  open({ file }) {
    opened = Promise.all([layers, pixelsOf(file)]).then(([layers, { picture, scale }]) => ({ outliner: new Outliner(layers, picture), scale }));
    return opened.then(() => true);
  },

  // The outline of the object at the clicks, and its border as the path of an SVG; in pixels of the picture. `before` is
  // the outline without the last click.
  async find({ clicks, hint, before }) {
    const { outliner, scale } = await opened;
    const small = clicks.map(({ x, y, inside }) => ({ x: x * scale, y: y * scale, inside }));
    const loop = hint && hint.map(([x, y]) => [x * scale, y * scale]);
    const found = outliner.find(small, loop, before && { ...before, window: times(before.window, scale) });
    const window = times(found.window, 1 / scale);
    return { ...found, window, path: traced(found, window) };
  },

  grow({ pixels, radius }) {
    return grown(pixels, radius);
  },

  // A mask from a file: transparent pixels are masked, or white ones if none is transparent. Or the size that is wrong.
  async read({ file, picture, size }) {
    const { width, height } = size;
    const full = await createImageBitmap(file);
    if (full.width !== picture.width || full.height !== picture.height) return { wrong: [full.width, full.height] };
    const { data } = drawn(full, width, height, false);
    const hasAlpha = data.some((value, at) => at % 4 === 3 && value < 128);
    const isMasked = hasAlpha
      ? (_, at) => (data[4 * at + 3] < 128 ? 1 : 0)
      : (_, at) => (0.299 * data[4 * at] + 0.587 * data[4 * at + 1] + 0.114 * data[4 * at + 2] >= 128 ? 1 : 0);
    return { width, height, data: Uint8Array.from({ length: width * height }, isMasked) };
  },
};

const times = ({ x, y, width, height }, scale) => ({ x: x * scale, y: y * scale, width: width * scale, height: height * scale });

async function pixelsOf(file) {
  const full = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(full.width, full.height));
  return { picture: drawn(full, Math.round(full.width * scale), Math.round(full.height * scale), true), scale };
}

function drawn(bitmap, width, height, isSmooth) {
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  Object.assign(context, { imageSmoothingEnabled: isSmooth, imageSmoothingQuality: "medium" });
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return context.getImageData(0, 0, width, height);
}

onmessage = async ({ data: { id, act, ...given } }) => {
  try {
    postMessage({ id, made: await ACTS[act](given) });
  } catch (error) {
    postMessage({ id, failure: error.message });
  }
};
