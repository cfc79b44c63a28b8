// One run: sends picture, mask and settings to the API, and reports progress.
import { ask, bytesOf, events } from "./api.js";
import { maskPng } from "./png.js";
import { shrunk } from "./picture.js";

const MANY_PIXELS = 4e6; // intermediate pictures are sent at full size, so large ones are sent less often

export async function runEdit({ picture, mask, settings }, on, signal) {
  const form = new FormData();
  form.append("image", picture.file, "picture");
  form.append("mask", await maskPng(mask, picture.width, picture.height), "mask.png");
  const partials = picture.width * picture.height > MANY_PIXELS ? 1 : 3;
  const fields = { ...settings, stream: true, stream_progress: true, partial_images: partials };
  for (const [name, value] of Object.entries(fields)) if (value !== "") form.append(name, value);
  const response = await ask("/v1/images/edits", { method: "POST", body: form, signal });
  for await (const event of events(response)) await HANDLERS[event.type]?.(event, on);
}

const HANDLERS = {
  "instgenie.queued": (event, on) => on.queued(event.index, event.position),
  "instgenie.step": (event, on) => on.step(event.index, event.step, event.num_steps),
  "image_edit.partial_image": async (event, on) => {
    if (event.index === 0) on.partial((await opened(event)).bitmap);
  },
  "image_edit.completed": async (event, on) => on.completed({ ...(await opened(event)), facts: factsOf(event) }),
};

async function opened({ b64_json }) {
  const file = new Blob([bytesOf(b64_json)], { type: "image/png" });
  return { file, ...(await shrunk(file)) };
}

function factsOf({ b64_json, ...facts }) {
  return facts;
}
