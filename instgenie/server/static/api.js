// Requests to the server: adds the API key, turns failures into readable errors, reads server-sent events.
import { askForKey } from "./key.js";

const KEY = "instgenie.key"; // kept for this tab only

export class ApiError extends Error {
  constructor(status, facts) {
    super(facts.message);
    this.status = status;
    this.code = facts.code;
    this.param = facts.param;
  }
}

// Returns the response of a successful request. Asks the user for the key if the server needs one.
export async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const response = await reach(path, { ...options, headers: { ...headers, ...options.headers } });
    if (response.ok) return response;
    if (response.status !== 401) throw new ApiError(response.status, await errorOf(response));
    sessionStorage.setItem(KEY, await askForKey(key !== null));
  }
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server cannot be reached. Is it still running?" });
  }
}

async function errorOf(response) {
  try {
    return (await response.json()).error;
  } catch {
    return { message: `The server answered with status ${response.status}.` };
  }
}

// Yields the data of each event until the server ends the stream.
export async function* events(response) {
  let pieces = []; // joined only at line ends: a picture arrives in thousands of pieces
  for await (const piece of texts(response)) {
    pieces.push(piece);
    if (!piece.includes("\n")) continue;
    const blocks = pieces.join("").split("\n\n");
    pieces = [blocks.pop()];
    for (const block of blocks) {
      const line = block.split("\n").find((line) => line.startsWith("data: "));
      if (!line || line === "data: [DONE]") continue;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new ApiError(response.status, data.error);
      yield data;
    }
  }
}

async function* texts(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
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

export function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}
