// Lets shares of an object follow the edges of a picture: in each neighbourhood they are a linear function of the colour (a
// guided filter, He, Sun and Tang), fitted on a coarse grid and evaluated on a fine one.
import { blurred, scaled } from "./grid.js";

const RADIUS = 5; // cells of the coarse grid in which colours tell inside from outside
const EVENNESS = 1e-3; // variance of colours below which there is no edge

// `shares` lie on the grid of `coarse`; `coarse` and `fine` are three planes of colours each. Returns shares on the fine grid.
export function alongEdges(shares, coarse, fine) {
  const { width, height } = fine[0];
  const [a, b, c, d] = linear(coarse, shares).map((factor) => scaled(blurred(factor, RADIUS), width, height).data);
  const [red, green, blue] = fine.map((plane) => plane.data);
  for (let at = 0; at < d.length; at++) d[at] += a[at] * red[at] + b[at] * green[at] + c[at] * blue[at];
  return { width, height, data: d };
}

// The factors of red, green and blue, and the constant, that fit the shares best around each cell.
function linear(guide, shares) {
  const { width, height } = shares;
  const mean = (data) => blurred({ width, height, data }, RADIUS).data;
  const planes = guide.map(({ data }) => data);
  const [red, green, blue] = planes.map(mean);
  const share = mean(shares.data);
  const covariance = (one, other, meanOfOne, meanOfOther) => {
    const product = mean(one.map((value, at) => value * other[at]));
    for (let at = 0; at < product.length; at++) product[at] -= meanOfOne[at] * meanOfOther[at];
    return product;
  };
  const [rr, rg, rb] = planes.map((plane, i) => covariance(planes[0], plane, red, [red, green, blue][i]));
  const [gg, gb, bb] = [[1, 1], [1, 2], [2, 2]].map(([i, j]) => covariance(planes[i], planes[j], [red, green, blue][i], [red, green, blue][j]));
  const [rs, gs, bs] = planes.map((plane, i) => covariance(plane, shares.data, [red, green, blue][i], share));
  const made = [0, 1, 2, 3].map(() => ({ width, height, data: new Float32Array(width * height) }));
  const [forRed, forGreen, forBlue, constant] = made.map(({ data }) => data);
  for (let at = 0; at < share.length; at++) { // Cramer's rule
    const [a, d, f] = [rr[at] + EVENNESS, gg[at] + EVENNESS, bb[at] + EVENNESS];
    const [b, c, e] = [rg[at], rb[at], gb[at]];
    const [m, n, o] = [d * f - e * e, c * e - b * f, b * e - c * d];
    const [p, q, r] = [a * f - c * c, b * c - a * e, a * d - b * b];
    const determinant = a * m + b * n + c * o;
    forRed[at] = (m * rs[at] + n * gs[at] + o * bs[at]) / determinant;
    forGreen[at] = (n * rs[at] + p * gs[at] + q * bs[at]) / determinant;
    forBlue[at] = (o * rs[at] + q * gs[at] + r * bs[at]) / determinant;
    constant[at] = share[at] - forRed[at] * red[at] - forGreen[at] * green[at] - forBlue[at] * blue[at];
  }
  return made;
}
