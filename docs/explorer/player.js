// Plays an animation position by position: buttons, a slider, and the keys space, left and right.

const SECONDS_PER_STEP = 0.55;

/**
 * @param elements {figure, play, back, forward, slider, readout}
 * @param {(position: number) => string} draw draws one moment and returns its sentence.
 */
export function createPlayer(elements, draw) {
  const reduced = window.matchMedia("(prefers-reduced-motion: reduce)");
  let position = 5;
  let most = 63;
  let kind = "";
  let smooth = false;
  let playing = false;
  let last = 0;
  let request = 0;

  function show(spoken) {
    const sentence = draw(position);
    elements.readout.textContent = sentence;
    elements.slider.value = String(Math.round(position));
    elements.slider.setAttribute("aria-valuetext", `position ${Math.round(position)}`);
    elements.readout.setAttribute("aria-live", spoken ? "polite" : "off");
  }

  function tick(now) {
    if (!playing) return;
    const passed = Math.min((now - last) / 1000 / SECONDS_PER_STEP, 1);
    last = now;
    const before = position;
    // Without motion, or where halves have no meaning, the picture changes only at whole positions.
    clock += passed;
    position = smooth && !reduced.matches ? clock % (most + 1) : Math.floor(clock) % (most + 1);
    if (position > most) position = most;
    if (position !== before) show(false);
    request = requestAnimationFrame(tick);
  }
  let clock = 0;

  function setPlaying(wanted) {
    playing = wanted;
    elements.play.textContent = playing ? "Pause" : "Play";
    elements.play.setAttribute("aria-pressed", String(playing));
    cancelAnimationFrame(request);
    if (playing) {
      clock = position >= most ? 0 : position;
      last = performance.now();
      request = requestAnimationFrame(tick);
    } else {
      position = Math.round(position);
      show(true);
    }
  }

  function step(by) {
    if (playing) setPlaying(false);
    position = Math.min(Math.max(Math.round(position) + by, 0), most);
    show(true);
  }

  elements.play.addEventListener("click", () => setPlaying(!playing));
  elements.back.addEventListener("click", () => step(-1));
  elements.forward.addEventListener("click", () => step(1));
  elements.slider.addEventListener("input", () => {
    if (playing) setPlaying(false);
    position = Number(elements.slider.value);
    show(true);
  });
  elements.figure.addEventListener("keydown", (event) => {
    const actions = { " ": () => setPlaying(!playing), ArrowLeft: () => step(-1), ArrowRight: () => step(1) };
    if (event.target !== elements.figure || !actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });

  return {
    /** Shows another subject; the position is kept if it exists there. */
    set(settings) {
      if (settings.kind !== kind) position = settings.start ?? 5;
      kind = settings.kind;
      most = settings.most;
      smooth = settings.smooth;
      elements.slider.max = String(most);
      position = Math.min(position, most);
      clock = position;
      show(false);
    },
    redraw: () => show(false),
  };
}
