// Asks for the API key, once for all requests that need it.
import { element } from "./dom.js";

let asking = null;

export function askForKey(isWrong) {
  asking ??= show(isWrong).finally(() => (asking = null));
  return asking;
}

function show(isWrong) {
  const input = element("input", { type: "password", id: "key", required: true, autocomplete: "off", spellcheck: false });
  const dialog = element(
    "dialog",
    { className: "key", ariaLabel: "API key" },
    element(
      "form",
      { method: "dialog" },
      element("h2", { textContent: "This server needs a key" }),
      element("p", {
        className: isWrong ? "error" : "quiet",
        textContent: isWrong ? "The server does not know that key." : "It is kept for this tab only.",
      }),
      element("label", { htmlFor: "key", textContent: "API key" }),
      input,
      element("button", { className: "primary", textContent: "Continue" }),
    ),
  );
  document.body.append(dialog);
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  dialog.showModal();
  return new Promise((resolve) =>
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(input.value.trim());
    }),
  );
}
