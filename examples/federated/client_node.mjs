// node client_node.mjs ADDRESS CLIENT: the same client without a page. Copy ../train_in_a_browser/onnxtool-training.mjs next to it.
import * as ort from "onnxruntime-node";
import { ownBatches, takePart } from "./client.mjs";

const [url, client] = process.argv.slice(2);
const batches = ownBatches(await (await fetch(new URL("training.json", url))).json(), Number(client));
const trainer = await takePart({ ort, url, client, batches, samples: 160 });
console.log((await trainer.evaluate(batches[0])).loss);
