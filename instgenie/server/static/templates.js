// Lists, registers and removes templates, through the API like any client.
import { ask } from "./api.js";
import { bytes, element, find } from "./dom.js";

const MS_BETWEEN_LOOKS = 2000;

export async function watchTemplates() {
  find("register").addEventListener("submit", (event) => {
    event.preventDefault();
    register();
  });
  for (;;) {
    if (!document.hidden) await attempt(refresh);
    await new Promise((resolve) => setTimeout(resolve, MS_BETWEEN_LOOKS));
  }
}

async function refresh() {
  const { data } = await (await ask("/v1/templates")).json();
  const none = element("li", { className: "none", textContent: "None yet: edit a picture, or register one." });
  find("templates").replaceChildren(...(data.length ? data.map(row) : [none]));
}

function row({ id, state, size, num_steps, num_registered_steps, tier_bytes, message }) {
  const places = Object.entries(tier_bytes).map(([tier, amount]) => `${bytes(amount)} on ${tier}`);
  const progress = state === "registering" ? `${state}, step ${num_registered_steps} of ${num_steps}` : message || state;
  const remove = element("button", { type: "button", textContent: "Remove", ariaLabel: `Remove template ${id.slice(0, 8)}` });
  remove.addEventListener("click", () => act(remove, () => ask(`/v1/templates/${id}`, { method: "DELETE" })));
  return element(
    "li",
    {},
    element("code", { textContent: id.slice(0, 8), title: id }),
    element("span", { textContent: size.replace("x", " × ") }),
    element("span", { textContent: `${num_steps} steps` }),
    element("span", { className: state === "failed" ? "error" : "quiet", textContent: [progress, ...places].join(", ") }),
    remove,
  );
}

async function register() {
  const [file] = find("picture").files;
  if (!file) {
    find("error").textContent = "Choose a picture to register.";
    return;
  }
  const form = new FormData();
  form.append("image", file, "picture");
  if (find("steps").value) form.append("num_inference_steps", find("steps").value);
  await act(find("add"), () => ask("/v1/templates", { method: "POST", body: form }));
}

async function act(button, work) {
  find("error").textContent = "";
  button.disabled = true;
  await attempt(async () => {
    await work();
    await refresh();
  });
  button.disabled = false;
}

async function attempt(work) {
  try {
    await work();
  } catch (error) {
    find("error").textContent = error.message;
  }
}
