// The texts on the page whose contrast with what is behind them is below 4.5, as [contrast, text].
() => {
  const texts = "p, a, span, label, button, summary, h1, h2, li, code, text.tick, text.axis-label, text.direct";
  const numbers = (color) => color.match(/[\d.]+/g).map(Number);
  const light = (color) =>
    numbers(color)
      .slice(0, 3)
      .map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
      .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (numbers(color)[3] !== 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll(texts)]
    .filter((one) => one.textContent.trim() && one.getClientRects().length)
    .map((one) => {
      const style = getComputedStyle(one);
      const own = light(one instanceof SVGElement ? style.fill : style.color);
      const [a, b] = [own, light(behind(one))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), one.textContent.trim().slice(0, 30)];
    })
    .filter(([contrast]) => contrast < 4.5);
};
