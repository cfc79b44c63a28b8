// Facts shown beside a result: how much was computed, where the rest came from, how long it took.
import { controlsIn } from "./controls.js";
import { percent, seconds, terms } from "./dom.js";
import { lorasIn } from "./loras.js";

const TIERS = { gpu: "GPU memory", host: "host memory", disk: "disk", peer: "the memory of another worker", remote: "remote store" };

export function showFacts(list, { facts, share, values }) {
  const { queue, prepare, denoise, finish } = facts.seconds;
  list.replaceChildren(
    ...terms([
      ...(share ? [["Painted", percent(share), "of the picture's pixels"]] : []),
      ["Computed", percent(facts.num_computed_tokens / facts.num_tokens), `of the picture at each step; the mask touches ${percent(facts.masked_share)}`],
      ["Reused", ...reusedOf(facts)],
      ["Steps took", seconds(denoise), ...savedOf(facts)],
      ["Other time", seconds(queue + prepare + finish), `of which ${seconds(queue)} waiting`],
      ["Seed", String(facts.seed)],
      ...(values.loras ? [["LoRAs", lorasIn(values.loras).map(([name, scale]) => `${name} × ${scale}`).join(", ")]] : []),
      ...(values.controls ? [["ControlNets", controlsIn(values.controls).map(({ name, scale }) => `${name} × ${scale}`).join(", ")]] : []),
      ...(facts.notes.length ? [["Notes", ...facts.notes]] : []),
    ]),
  );
}

function reusedOf({ cache_tier, reuse, reuse_reason }) {
  if (reuse === "own") return ["the rest, at most steps", reuse_reason ?? ""];
  return cache_tier ? ["the rest", `from ${TIERS[cache_tier]}`] : ["nothing", reuse_reason ?? ""];
}

function savedOf({ reuse, seconds: { denoise }, predicted_dense_seconds: dense }) {
  if (reuse === "none") return ["the whole picture was computed"];
  return [`computing the whole picture: ${seconds(dense)} predicted, ${(dense / Math.max(denoise, 1e-6)).toFixed(1)}× as long`];
}
