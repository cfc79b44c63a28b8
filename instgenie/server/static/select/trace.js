// Traces the border of a grid's cells as the path of an SVG, in pixels of the picture.

// `window` is where the grid lies in the picture: {x, y, width, height}.
export function traced({ width, height, data }, window) {
  const inside = (x, y) => x >= 0 && y >= 0 && x < width && y < height && data[y * width + x] === 1;
  const edges = new Map(); // from a corner to the next ones, with the inside on the right
  const corner = (x, y) => y * (width + 1) + x;
  const add = (from, to) => (edges.get(from) ?? edges.set(from, []).get(from)).push(to);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (!inside(x, y)) continue;
      if (!inside(x, y - 1)) add(corner(x, y), corner(x + 1, y));
      if (!inside(x + 1, y)) add(corner(x + 1, y), corner(x + 1, y + 1));
      if (!inside(x, y + 1)) add(corner(x + 1, y + 1), corner(x, y + 1));
      if (!inside(x - 1, y)) add(corner(x, y + 1), corner(x, y));
    }
  }
  const paths = [];
  for (const start of edges.keys()) {
    while (edges.get(start).length) paths.push(loop(edges, start));
  }
  const place = (at) => [
    (window.x + ((at % (width + 1)) * window.width) / width).toFixed(1),
    (window.y + (Math.floor(at / (width + 1)) * window.height) / height).toFixed(1),
  ];
  return paths.map((corners) => `M${simplified(corners).map(place).join("L")}Z`).join("");
}

function loop(edges, start) {
  const corners = [start];
  for (let at = edges.get(start).pop(); at !== start; at = edges.get(at).pop()) corners.push(at);
  return corners;
}

// Leaves out corners on a straight line.
function simplified(corners) {
  const kept = corners.filter((at, i) => at - corners.at(i - 1) !== corners[(i + 1) % corners.length] - at);
  return kept.length ? kept : corners;
}
