// The probabilities of the next token by llama.cpp, through node-llama-cpp, a second program that contains it.
//
//     npm install node-llama-cpp
//     node benchmarks/llama_cpp.mjs FOLDER_OF_NODE_MODULES model.gguf < prompts.json > probabilities.json
//
// The input is a list of lists of token ids. The output has an object for each: {token id: probability}, of the tokens
// with the largest probabilities. Prompts are read in one batch, except the last token, which is decoded with the cache.

import {readFileSync} from "node:fs";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const [folder, file] = process.argv.slice(2);
const home = createRequire(`${folder}/`).resolve("node-llama-cpp");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(home).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: file});
const prompts = JSON.parse(readFileSync(0, "utf8"));
const longest = Math.max(...prompts.map((prompt) => prompt.length));
const context = await model.createContext({contextSize: longest + 8, sequences: 1, flashAttention: false});
const sequence = context.getSequence();
const results = [];
for (const prompt of prompts) {
    await sequence.clearHistory();
    await sequence.evaluateWithoutGeneratingNewTokens(prompt.slice(0, -1));
    const ask = {generateNext: {probabilities: true}};
    const [output] = await sequence.controlledEvaluate([[prompt.at(-1), ask]]);
    results.push(Object.fromEntries([...output.next.probabilities].slice(0, 4096)));
}
console.log(JSON.stringify(results));
process.exit(0);
