// Cases of the openai package for Node and of the AI SDK. Usage: node clients.mjs URL FOLDER
import fs from "node:fs";
import { createRequire } from "node:module";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateImage, experimental_generateImage } from "ai";
import OpenAI, { toFile } from "openai";

const [url, folder] = process.argv.slice(2);
const require = createRequire(import.meta.url);
const version = (name) => JSON.parse(fs.readFileSync(require.resolve(name).split(`node_modules/${name}/`)[0]
  + `node_modules/${name}/package.json`)).version;
const read = (name) => fs.readFileSync(`${folder}/${name}`);
const prompt = "a red flower";

const node = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const file = (name) => toFile(read(name), name, { type: "image/png" });
const edit = async (fields) =>
  node.images.edit({ model: "gpt-image-1", prompt, num_inference_steps: 2, image: await file("image.png"), ...fields });
const count = (answer) => `${answer.data.filter((one) => one.b64_json).length} pictures, notes: ${JSON.stringify(answer.notes ?? [])}`;

const cases = {
  [`openai (node) ${version("openai")}`]: {
    masked: async () => count(await edit({ mask: await file("mask.png") })),
    unmasked: async () => count(await edit({})),
    "several images": async () => count(await edit({ image: [await file("image.png"), await file("other.png")] })),
    "n=2": async () => count(await edit({ mask: await file("mask.png"), n: 2 })),
    stream: async () => {
      const types = [];
      for await (const event of await edit({ mask: await file("mask.png"), stream: true, partial_images: 1 })) types.push(event.type);
      return types.join(", ");
    },
    generate: async () => count(await node.images.generate({ model: "gpt-image-1", prompt, num_inference_steps: 2 })),
  },
};

const make = generateImage ?? experimental_generateImage;
const providers = {
  "@ai-sdk/openai": createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).image("gpt-image-1"),
  "@ai-sdk/openai-compatible": createOpenAICompatible({ name: "instgenie", baseURL: `${url}/v1` }).imageModel("builtin"),
};
for (const [name, model] of Object.entries(providers)) {
  const run = async (request, n = 1) => {
    const { images, warnings } = await make({ model, prompt: request, n, maxRetries: 0, size: "256x256" });
    return `${images.length} pictures, warnings: ${JSON.stringify(warnings)}`;
  };
  cases[`${name} ${version(name)}`] = {
    masked: () => run({ images: [read("image.png")], mask: read("mask.png"), text: prompt }),
    unmasked: () => run({ images: [read("image.png")], text: prompt }),
    "several images": () => run({ images: [read("image.png"), read("other.png")], text: prompt }),
    "n=2": () => run({ images: [read("image.png")], mask: read("mask.png"), text: prompt }, 2),
    generate: () => run(prompt),
  };
}

for (const [client, named] of Object.entries(cases)) {
  for (const [name, run] of Object.entries(named)) {
    let outcome;
    try {
      outcome = await run();
    } catch (failed) {
      const status = failed.status ?? failed.statusCode;
      outcome = [400, 404].includes(status) ? `refused ${status}: ${failed.message}` : `BROKEN: ${failed}`;
    }
    console.log(JSON.stringify({ client, case: name, outcome }));
  }
}
