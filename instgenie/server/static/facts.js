// Facts shown beside a result: how much was computed, where activations came from, how long it took.
import { percent, seconds, terms } from "./dom.js";

const TIERS = { gpu: "GPU memory", host: "host memory", disk: "disk", remote: "remote store" };

export function showFacts(list, { facts, share }) {
  const masked = Math.round(facts.masked_share * facts.num_tokens);
  const { queue, prepare, denoise, finish } = facts.seconds;
  list.replaceChildren(
    ...terms([
      ...(share ? [["Painted", percent(share), "of the picture's pixels"]] : []),
      ["Computed", `${facts.num_computed_tokens} of ${facts.num_tokens}`, `tokens at each step; the mask touches ${masked}`],
      ["Cache", ...cacheOf(facts)],
      ["Steps took", seconds(denoise), ...savedOf(facts)],
      ["Other time", seconds(queue + prepare + finish), `of which ${seconds(queue)} waiting`],
      ["Seed", String(facts.seed)],
      ...(facts.notes.length ? [["Notes", ...facts.notes]] : []),
    ]),
  );
}

function cacheOf({ cache_tier, reuse, reuse_reason }) {
  if (reuse === "own") return ["own", reuse_reason ?? ""];
  return cache_tier ? ["hit", `from ${TIERS[cache_tier]}`] : ["miss", reuse_reason ?? ""];
}

function savedOf({ reuse, seconds: { denoise }, predicted_dense_seconds: dense }) {
  if (reuse === "none") return ["every token computed"];
  return [`computing every token: ${seconds(dense)} predicted, ${(dense / Math.max(denoise, 1e-6)).toFixed(1)}× as long`];
}
