// Runs in the page: computes cases with the modules of the page. A case is {scheme, options, heads, causal, length}.
async () => {
  const at = (name) => import(new URL(name, location.href).href);
  const [model, view, state, registry] = await Promise.all(["model.js", "view.js", "state.js", "schemes/registry.js"].map(at));
  const read = async (name) => (await fetch(new URL(`data/${name}.json`, location.href))).json();
  const [library, tables, trained] = await Promise.all(["options", "tables", "trained"].map(read));
  const data = { library, tables, trained };
  const list = (values) => Array.from(values);
  const words = (length) => Array.from({ length }, (_, i) => ({ key: `w${i % 17}` }));

  window.harness = {
    // All values at the ends of every control, and every choice.
    cases(name, place) {
      const scheme = registry.schemeNamed(name);
      const found = [{}];
      const seen = new Set();
      // A choice may bring controls with it: these are read with that choice.
      const bases = [{}, ...scheme.controls.filter((control) => Array.isArray(control.choices)).flatMap((control) => control.choices.map((one) => ({ [control.option]: one })))];
      if (scheme.weights) bases.push(...Object.keys(scheme.weights).map((weights) => ({ weights })));
      for (const base of bases) {
        const options = state.validOptions(scheme, base, place, library);
        for (const control of state.controlsOf(scheme, options, place, library)) {
          const values = control.kind === "boolean" ? [true, false] : control.choices ?? [control.from, control.to];
          for (const value of values) {
            const one = JSON.stringify(state.validOptions(scheme, { ...base, [control.option]: value }, place, library));
            if (!seen.has(one)) found.push(JSON.parse(one));
            seen.add(one);
          }
        }
      }
      return found;
    },
    compute({ scheme: name, options: wanted, heads, causal, length }) {
      const scheme = registry.schemeNamed(name);
      const place = { heads, causal, length };
      const options = state.validOptions(scheme, wanted, place, library);
      const first = view.partsOf(scheme, options, place, data);
      const shown = Math.min(length, first.reach ?? length);
      const own = { heads: Math.min(heads, first.heads ?? heads), causal, length: shown };
      const parts = view.partsOf(scheme, options, own, data);
      const { attention, outputs } = model.attend(words(shown), parts, own);
      const inputs = words(shown).map(({ key }, i) => {
        const vector = model.wordVector(key);
        return parts.added ? vector.map((value, c) => value + parts.added(i)[c]) : vector;
      });
      const project = (head, kind) => inputs.map((input) => model.headWeights(head)[kind].map((row) => row.reduce((sum, value, c) => sum + value * input[c], 0)));
      return {
        config: { scheme: name, ...view.libraryOptions({ scheme, options }) },
        options,
        heads: own.heads,
        length: shown,
        reach: first.reach ?? null,
        added: parts.added ? Array.from({ length: shown }, (_, i) => list(parts.added(i))) : null,
        logits: Array.from({ length: own.heads }, (_, head) => model.logits(parts, project(head, "query"), project(head, "key"), head)),
        attention,
        outputs: outputs.map(list),
      };
    },
    words: (length) => words(length).map(({ key }) => list(model.wordVector(key))),
    vectors: (sentence) => model.wordsOf(sentence).map(({ key }) => list(model.wordVector(key))),
    weights: (heads) => Object.fromEntries(["query", "key", "value", "output"].map((kind) => [kind, Array.from({ length: heads }, (_, head) => model.headWeights(head)[kind].map(list))])),
    schemes: registry.SCHEMES.filter((scheme) => !scheme.examples).map((scheme) => scheme.name),
  };
}
