// Runs parts of the page's outlines under Node for test_outlines.py: reads one request from a file, writes one answer.
import { readFileSync } from "node:fs";
import { readLayers } from "../../instgenie/server/static/select/network.js";
import { Outliner } from "../../instgenie/server/static/select/outline.js";
import { refined } from "../../instgenie/server/static/select/refine.js";

const { act, ...given } = JSON.parse(readFileSync(process.argv[2], "utf8"));

const ACTS = {
  // What the network says of a picture of 128 pixels.
  logits({ weights, picture, width, height, clicks, hint, before }) {
    const layers = readLayers(Uint8Array.from(weights).buffer);
    const window = { x: 0, y: 0, width, height };
    const outliner = new Outliner(layers, { width, height, data: Uint8Array.from(picture) });
    return Array.from(outliner.logits(window, clicks, hint, before && { window, width, height, data: before }).data);
  },

  refined({ shares, before, width, height, click }) {
    const grid = (data) => ({ width, height, data });
    return Array.from(refined(grid(shares), grid(Uint8Array.from(before)), click).data);
  },
};

process.stdout.write(JSON.stringify(ACTS[act](given)));
