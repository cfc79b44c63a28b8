// Requests to the server: adds the API key, turns failures into readable errors.
import { askForKey } from "./key.js";
import { events as streamed } from "./stream.js";

const KEY = "instgenie.key"; // kept for this tab only

const UNREACHABLE = "The server cannot be reached. Is it still running?";

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
    throw new ApiError(0, { message: UNREACHABLE, code: "unreachable" });
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
  yield* streamed(response.body);
}
