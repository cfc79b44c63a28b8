// Reads server-sent events from the body of a response, here or in a worker thread.
import { decoded } from "./bitmap.js";

const MS_BETWEEN_REPORTS = 150;

export class StreamError extends Error {
  constructor(facts) {
    super(facts.message);
    Object.assign(this, { code: facts.code, param: facts.param });
  }
}

// Yields the data of each event until the server ends the stream. `onBytes` hears how many bytes have come.
export async function* events(body, onBytes = () => {}) {
  let pieces = []; // joined only at line ends: a picture arrives in thousands of pieces
  for await (const piece of texts(body)) {
    onBytes(piece.length);
    pieces.push(piece);
    if (!piece.includes("\n")) continue;
    const blocks = pieces.join("").split("\n\n");
    pieces = [blocks.pop()];
    for (const block of blocks) {
      const line = block.split("\n").find((line) => line.startsWith("data: "));
      if (!line || line === "data: [DONE]") continue;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new StreamError(data.error);
      yield data;
    }
  }
}

// Yields the events of an edit. Pictures are decoded: {file, width, height, bitmap} in place of b64_json. While one comes
// whose size was announced, {type: "received", share} comes too.
export async function* editEvents(body) {
  const reports = [];
  let [coming, came, last] = [0, 0, 0];
  const count = (bytes) => {
    came += bytes;
    if (coming && performance.now() - last > MS_BETWEEN_REPORTS) {
      last = performance.now();
      reports.push({ type: "received", share: Math.min(came / coming, 1), bytes: coming });
      reports.wake?.();
    }
  };
  const source = events(body, count);
  let next = source.next();
  for (;;) {
    const woken = new Promise((resolve) => (reports.wake = resolve));
    const first = await Promise.race([next, woken]);
    yield* reports.splice(0);
    if (!first) continue;
    if (first.done) return;
    if (first.value.type === "instgenie.sending") [coming, came] = [first.value.num_bytes, 0];
    else if (first.value.type.endsWith(".completed")) coming = 0;
    yield await withPicture(first.value);
    next = source.next();
  }
}

async function withPicture({ b64_json, ...event }) {
  if (!b64_json) return event;
  const file = new Blob([bytesOf(b64_json)], { type: "image/png" });
  return { ...event, file, ...(await decoded(file)) };
}

async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}
