// The fields of an edit that people set on the page. A new field of the API is one entry here: settings.js makes its
// control, its part of the request, of the URL and of the stored state, and its help from it. The server sends the
// ranges, the choices and the model's own values (page/facts); a field that the server does not know is not shown.
//
// name     the API's name
// id       of the control, and in the URL
// label    above the control
// kind     number, slider, choice, switch, text; or own: the document has the control already
// place    the part of the panel that shows it, see data-fields in edit.html; mask: beside the mask tools
// first    its first value; a value like it is not sent, so that the server's own applies
// hint     a placeholder, unless the model has a value of its own
// choices  {value: text}, if not all of the server's; step, minimum, maximum: if narrower than the server's
// wide     true: takes a whole row
// keeps    false: not in the URL
// help     one or two sentences behind the label's "?"
export const FIELDS = [
  { name: "prompt", id: "prompt", label: "What should be there?", kind: "own" },
  { name: "loras", id: "loras", label: "LoRAs", kind: "own" },
  { name: "controls", id: "controls", label: "ControlNets", kind: "own", keeps: false },
  {
    name: "n", id: "count", label: "Variants", kind: "number", place: "main", first: "1",
    help: "How many results to make. They differ only in their seeds and are shown side by side.",
  },
  {
    name: "quality", id: "quality", label: "Quality", kind: "choice", place: "main", first: "balanced",
    choices: { fast: "Fast", balanced: "Balanced", exact: "Exact" },
    help: "Fast and Balanced compute only what is masked: at all steps of a picture that the engine knows, at most steps of a new one. Exact computes the whole picture at every step: slower, and seldom visibly better.",
  },
  {
    name: "seed", id: "seed", label: "Seed", kind: "number", place: "main", minimum: 0, hint: "random",
    help: "The same seed with the same settings gives the same result. Leave it empty for a new one each time.",
  },
  {
    name: "num_inference_steps", id: "steps", label: "Steps", kind: "number", place: "main",
    help: "How often the picture is refined. Fewer steps are quicker and rougher; beyond the model's own number little is gained.",
  },
  {
    name: "guidance_scale", id: "guidance", label: "Guidance", kind: "number", place: "main", step: "any",
    help: "How closely the result follows the prompt. High values exaggerate, low values ignore it.",
  },
  {
    name: "strength", id: "strength", label: "Strength", kind: "slider", place: "more", first: "1", minimum: 0.05, step: 0.05,
    help: "How much of what is under the mask is replaced. Below 1, its shapes and colours shine through.",
  },
  {
    name: "masked_content", id: "content", label: "Starts from", kind: "choice", place: "more", first: "original",
    choices: { original: "Itself", surroundings: "Surroundings" },
    help: "What the masked part begins with, under noise. Itself shines through with a strength below 1. From its surroundings, what is there disappears: Remove asks for that. A strength of 1 then means the one that suits the model, and a model that is trained to remove things begins with noise alone.",
  },
  {
    name: "reuse", id: "reads", label: "Reuse", kind: "choice", place: "more", first: "auto",
    choices: { auto: "Whatever is there", own: "Of this edit alone", template: "Of the registered picture", off: "None" },
    help: "What the engine reads in the place of what is not masked: what it has registered of the picture, or else what a few whole steps of this edit left behind. All but the first give the same result before and after a registration.",
  },
  {
    name: "deadline_ms", id: "deadline", label: "Done within", kind: "number", place: "more", hint: "no limit", unit: "ms",
    help: "How many milliseconds the edit may take. Urgent edits go before others that can wait; one that is not done in time is given up.",
  },
  {
    name: "negative_prompt", id: "negative", label: "What should not be there?", kind: "text", place: "more", wide: true,
    help: "The result is steered away from these words.",
  },
  {
    name: "feather", id: "feather", label: "Feather", kind: "slider", place: "mask", first: "0", maximum: 64, step: 1, unit: "px",
    help: "The width of a soft edge inside the mask, where the result fades into the picture.",
  },
  {
    name: "crop", id: "crop", label: "Model sees", kind: "choice", place: "mask", first: "auto",
    choices: { auto: "What suits", masked: "Only around the mask", off: "Whole picture" },
    help: "A crop around the mask gives a small part of a large photograph more detail; the whole picture gives it more surroundings to match.",
  },
  {
    name: "crop_padding", id: "padding", label: "Padding, px", kind: "number", place: "mask", hint: "auto",
    help: "How many pixels around the mask a crop shows at least. Left empty, a quarter of the mask's size.",
  },
];
