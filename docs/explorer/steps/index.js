// The animations, position by position. Each is a function (container, view, position, settings) that draws one moment;
// `start` is the first position that is shown; `position` may lie between two positions while it moves. It returns the sentence below the picture.

import { drawBias } from "./bias.js";
import { drawBits } from "./bits.js";
import { drawLayers } from "./layers.js";
import { drawNothing } from "./nothing.js";
import { drawPairs } from "./pairs.js";
import { drawPlane } from "./plane.js";
import { drawRows } from "./rows.js";
import { drawShift } from "./shift.js";
import { drawWaves } from "./waves.js";

export const STEPS = {
  nothing: { draw: drawNothing, title: "Shuffling the words changes nothing" },
  shift: { draw: drawShift, title: "The vector is pushed along one direction", smooth: true },
  bits: { draw: drawBits, title: "The bits flip" },
  waves: { draw: drawWaves, title: "A fast and a slow wave", smooth: true },
  rows: { draw: drawRows, title: "One row of the table per position" },
  bias: { draw: drawBias, title: "Where each head looks among equal words" },
  bias_alone: { draw: drawBias, title: "Where the bias alone makes each head look" },
  layers: { draw: drawLayers, title: "Layer by layer", start: 0 },
  plane: { draw: drawPlane, title: "Query and key turn, their angle stays", smooth: true, turning: true },
  pairs: { draw: drawPairs, title: "The distances that the model is told", start: 40 },
};
