// One run: sends picture, mask and settings to the API, and reports what comes back.
import { ApiError, ask } from "./api.js";
import { controlParts } from "./controls.js";
import { editEvents } from "./stream.js";

const MANY_PIXELS = 4e6; // intermediate pictures are sent at full size, so large ones are sent less often
const BROKEN = "The server stopped answering in the middle of the edit.";

// `on` has a function for each kind of event.
export async function runEdit({ picture, maskFile, values }, on, signal) {
  const form = new FormData();
  form.append("image", picture.file, "picture");
  form.append("mask", maskFile, "mask.png");
  const partials = picture.width * picture.height > MANY_PIXELS ? 1 : 3;
  const { controls, ...others } = values;
  const fields = { ...others, stream: true, stream_progress: true, partial_images: partials };
  for (const [name, value] of [...Object.entries(fields), ...(controls ? controlParts(controls) : [])]) form.append(name, value);
  const response = await ask("/v1/images/edits", { method: "POST", body: form, signal });
  for await (const event of received(response.body, signal)) HANDLERS[event.type]?.(event, on);
}

const HANDLERS = {
  "instgenie.queued": (event, on) => on.queued(event),
  "instgenie.step": (event, on) => on.step(event),
  "instgenie.sending": (event, on) => on.received({ ...event, share: 0 }),
  received: (event, on) => on.received(event),
  "image_edit.partial_image": (event, on) => on.partial(event),
  "image_edit.completed": ({ file, width, height, bitmap, ...facts }, on) => on.completed({ file, width, height, bitmap, facts }),
};

// Yields the events of the answer, read by a worker thread where streams can be handed to one.
async function* received(body, signal) {
  const worker = new Worker("/static/receive.js", { type: "module" });
  try {
    try {
      worker.postMessage(body, [body]);
    } catch {
      yield* editEvents(body);
      return;
    }
    for await (const event of messages(worker, signal)) {
      if (event.type === "end") return;
      if (event.type === "failed") throw failure(event);
      yield event;
    }
  } catch (error) {
    signal.throwIfAborted();
    throw error instanceof ApiError || error.code ? error : failure({});
  } finally {
    worker.terminate();
  }
}

const failure = ({ code, param, message }) =>
  code ? new ApiError(200, { code, param, message }) : new ApiError(0, { code: "unreachable", message: BROKEN });

async function* messages(worker, signal) {
  const queue = [];
  let wake = () => {};
  worker.onmessage = ({ data }) => wake(queue.push(data));
  worker.onerror = () => wake(queue.push({ type: "failed" }));
  signal.addEventListener("abort", () => wake());
  for (;;) {
    signal.throwIfAborted();
    if (queue.length) yield queue.shift();
    else await new Promise((resolve) => (wake = resolve));
  }
}
