// A worker thread that reads the answer to an edit: texts of many megabytes and pictures are decoded here.
import { editEvents } from "./stream.js";

onmessage = async ({ data: body }) => {
  try {
    for await (const event of editEvents(body)) postMessage(event, event.bitmap ? [event.bitmap] : []);
    postMessage({ type: "end" });
  } catch ({ message, code, param }) {
    postMessage({ type: "failed", message, code, param });
  }
};
