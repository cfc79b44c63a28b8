// Changes an outline around one click: a click inside adds one connected region to it, a click outside takes one away. The
// region grows with the click's distance from the outline, so that a click beside it never selects half of the picture.
import { connected, distances } from "./grid.js";

const LEVELS = [0.5, 0.65, 0.8, 0.9, 0.97]; // a region that is too large at one level is cut at the next one
const FAR = 1; // reach of a click per distance from the outline
const WIDE = 0.5; // reach of a click per side of the outline
const LARGEST = 0.4; // share of the grid that one click changes at most

// `shares` are the object's as the network sees it now, `before` is the outline (1 inside) in the same cells, and `click` is
// {cell, inside}. Returns the outline after the click.
export function refined({ width, height, data: shares }, before, { cell, inside }) {
  const isNew = inside ? (at) => !before.data[at] : (at) => before.data[at];
  const share = inside ? (at) => shares[at] : (at) => 1 - shares[at];
  const made = { width, height, data: before.data.slice() };
  if (!isNew(cell)) return made;
  const away = Math.sqrt(distances({ width, height, data: before.data.map((value) => (inside ? value : 1 - value)) })[cell]);
  const area = before.data.reduce((sum, value) => sum + value, 0);
  const reach = FAR * Math.min(away, width + height) + WIDE * Math.sqrt(area);
  const limit = Math.min(2 * reach * reach, LARGEST * width * height);
  let region;
  for (const level of LEVELS) {
    region = regionAt(cell, made, (at) => isNew(at) && share(at) > level);
    if (region.length <= limit) break;
  }
  if (region.length > limit) region = nearest(region, cell, width, Math.sqrt(limit / Math.PI));
  for (const at of region) made.data[at] = inside ? 1 : 0;
  return made;
}

function nearest(region, cell, width, radius) {
  const [x, y] = [cell % width, Math.floor(cell / width)];
  return region.filter((at) => Math.hypot((at % width) - x, Math.floor(at / width) - y) < radius);
}

// All cells that belong and are connected with the first one, which always belongs to them.
function regionAt(first, grid, belongs) {
  const isSeen = new Uint8Array(grid.data.length);
  isSeen[first] = 1;
  return connected(first, grid, (at) => {
    if (isSeen[at]) return false;
    isSeen[at] = 1;
    return belongs(at);
  });
}
