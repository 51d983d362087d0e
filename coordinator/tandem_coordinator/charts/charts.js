// Reads values off charts and enlarges a part of them, on the live page and in a report.
//
// tandem_coordinator.charts.drawing writes a curve in the values that it shows, and a matrix takes them to pixels. So values are
// read off the paths, and to enlarge is to write another matrix, ticks, and places of what keeps its shape. Charts over
// the same axis are enlarged and read together. The content of a host may be replaced at any time; call adopt() then.
"use strict";

const Charts = (() => {
  const MIN = 1 / 500; // of an axis: the smallest part that is shown
  const SLACK = 6; // pixels beside a line's end at which it still has a value
  const DRAG = 5; // pixels that a press has to move to choose a part
  const TWICE = 350; // ms between two taps that are one
  const MAX_ROWS = 14;
  const HINT = "Arrow keys read values, plus and minus enlarge and reduce, Escape shows all.";
  const hosts = new Map();
  const views = new Map(); // name of an axis: {zoom: [low, high] or null, at: a value or null}
  const read = new WeakMap(); // a curve's element: its stretches of points
  let active = null; // {host, key}: whose values are shown
  let press = null; // {host, key, axis, from, to, pointer, x}: a part is being chosen
  const fingers = new Map(); // pointers of touches
  let pinch = null;
  let tapped = {time: 0, x: 0};
  let box = null;

  // Numbers, as tandem_coordinator.charts.drawing and tandem.formatting write them

  const grouped = (value) => Math.round(value).toLocaleString("en-US");

  const exponent = (words) => words.replace(/e([+-])(\d)$/, "e$10$2");

  function number(value) {
    const amount = Math.abs(value);
    if (amount >= 1000) return grouped(value);
    if (amount >= 100) return value.toFixed(0);
    if (amount >= 10) return value.toFixed(1);
    if (amount >= 1) return value.toFixed(3);
    if (amount >= 1e-2 || amount === 0) return value.toFixed(4);
    const digits = Number(value.toPrecision(4));
    return Math.abs(digits) >= 1e-4 ? String(digits) : exponent(digits.toExponential());
  }

  function told(value, unit) {
    if (unit === "share") return `${(100 * value).toFixed(2)} %`;
    if (unit === "count") return grouped(value);
    if (unit === "cores") return `${value.toFixed(value > 0 && value < 0.095 ? 2 : value < 9.95 ? 1 : 0)} cores`;
    return number(value);
  }

  function word(value, unit) {
    if (unit === "share") return `${Number((100 * value).toPrecision(4))} %`;
    const amount = Math.abs(value);
    if (value && (amount >= 1e7 || amount < 1e-4)) return exponent(Number(value.toPrecision(2)).toExponential());
    if (amount >= 1000 || Number.isInteger(value)) return grouped(value);
    return String(Number(value.toPrecision(6)));
  }

  function ticks(low, high, most, whole) {
    const power = Math.floor(Math.log10((high - low) / most));
    for (let exponent = power; exponent < power + 4; exponent++) {
      for (const step of [1, 2, 2.5, 5, 10]) {
        const distance = step * 10 ** exponent;
        if (whole && (distance < 1 || !Number.isInteger(distance))) continue;
        const first = Math.ceil(low / distance - 1e-9), last = Math.floor(high / distance + 1e-9);
        if (last - first + 1 <= most) {
          return Array.from({length: last - first + 1}, (_, index) => (first + index) * distance);
        }
      }
    }
    return [low];
  }

  // Ticks of a logarithmic axis, given and returned as logarithms
  function decades(low, high, most) {
    if (high - low < 1) return ticks(10 ** low, 10 ** high, most, false).filter((tick) => tick > 0).map(Math.log10);
    let found = [];
    for (const factors of [[1], [1, 3], [1, 2, 5]]) {
      const tried = [];
      for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
        for (const factor of factors) tried.push(power + Math.log10(factor));
      }
      const inside = tried.filter((tick) => low <= tick && tick <= high);
      if (inside.length > most && found.length) break;
      found = inside;
    }
    return found.filter((_, index) => index % Math.ceil(found.length / most) === 0);
  }

  // What a drawing says of itself

  const numbers = (words) => words.split(" ").map(Number);

  function chartsOf(host) {
    const svg = [...host.querySelectorAll("svg")].find((one) => one.getBoundingClientRect().width > 0);
    return svg ? [...svg.querySelectorAll("g.chart")].map(chartOf) : [];
  }

  function chartOf(element) {
    const [left, width, top, bottom] = numbers(element.dataset.plot);
    const low = Number(element.dataset.low), high = Number(element.dataset.high);
    const [, name, unit] = /^(.*?)(?: \((.*)\))?$/.exec(element.dataset.axis);
    return {element, left, width, top, bottom, low, high, name, unit: unit || "", key: element.dataset.axis,
      whole: element.dataset.whole === "1"};
  }

  function view(key) {
    if (!views.has(key)) views.set(key, {zoom: null, at: null});
    return views.get(key);
  }

  function range(chart) {
    return view(chart.key).zoom || [chart.low, chart.high];
  }

  function stretches(curve) {
    if (read.has(curve)) return read.get(curve);
    const found = [];
    for (const path of curve.querySelectorAll("path.values")) {
      let points = [];
      for (const [, command, words] of path.getAttribute("d").matchAll(/([MLHVhZ])([^MLHVhZ]*)/g)) {
        const [first, second] = numbers(words);
        const last = points[points.length - 1];
        if (command === "M") found.push(points = [[first, second]]);
        else if (command === "L") points.push([first, second]);
        else if (command === "H") points.push([first, last[1]]);
        else if (command === "V") points.push([last[0], first]);
      }
    }
    if (curve.dataset.kind === "dots") found.splice(0, found.length, found.flat());
    read.set(curve, found);
    return found;
  }

  function nearest(points, x) {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - points[low - 1][0] <= points[low][0] - x ? low - 1 : low;
  }

  // The value of a curve at a place: {x, y, top} with y in the units of its axis; null where it has none
  function valueOf(curve, x, pixel) {
    const kind = curve.dataset.kind;
    for (const points of stretches(curve)) {
      if (!points.length) continue;
      const first = points[0][0], last = points[points.length - 1][0];
      if (kind !== "dots" && (x < first - SLACK * pixel || x > last + SLACK * pixel)) continue;
      if (kind === "stairs") {
        const passed = points.filter((point) => point[0] < x || point[0] === first);
        return {x, y: passed[passed.length - 1][1]};
      }
      const index = nearest(points, x);
      if (kind !== "spread") return {x: points[index][0], y: points[index][1]};
      let low = points[index][1], high = low;
      for (const [place, y] of points) {
        if (Math.abs(place - points[index][0]) > 2 * pixel) continue;
        low = Math.min(low, y);
        high = Math.max(high, y);
      }
      return {x: points[index][0], y: low, top: high};
    }
    return null;
  }

  // Enlarge

  function make(name, attributes, parent) {
    const element = document.createElementNS(parent.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent.append(element);
    return element;
  }

  function place(chart, value) {
    const [low, high] = range(chart);
    return chart.left + chart.width * (value - low) / (high - low);
  }

  // A drawing remembers how it came, so that showing all again is exact
  function kept(element, attribute) {
    const name = `as${attribute}`;
    if (!(name in element)) {
      element[name] = attribute === "content" ? [...element.childNodes] : element.getAttribute(attribute);
    }
    return element[name];
  }

  function restore(element, attribute) {
    const name = `as${attribute}`;
    if (!(name in element)) return;
    if (attribute === "content") element.replaceChildren(...element[name]);
    else if (element[name] === null) element.removeAttribute(attribute);
    else element.setAttribute(attribute, element[name]);
  }

  function rescale(chart) {
    const zoomed = view(chart.key).zoom;
    const axis = chart.element.querySelector(":scope > .ticks");
    if (!zoomed) {
      for (const group of chart.element.querySelectorAll(".ticks")) restore(group, "content");
      for (const group of chart.element.querySelectorAll(".across, .curves, .mark")) restore(group, "transform");
      for (const group of chart.element.querySelectorAll(".plot")) group.removeAttribute("clip-path");
      for (const group of chart.element.querySelectorAll(".mark")) group.removeAttribute("visibility");
      chart.element.querySelectorAll("clipPath").forEach((one) => one.remove());
      return;
    }
    chart.element.querySelectorAll("clipPath").forEach((one) => one.remove());
    const [low, high] = zoomed;
    write(axis, ticks(low, high, Math.max(2, Math.floor(chart.width / 90)), chart.whole), (tick, line, text) => {
      const x = place(chart, tick);
      line.setAttribute("d", `M${x} ${chart.bottom}v4`);
      text.setAttribute("x", x);
      text.textContent = word(tick, "number");
    });
    for (const [index, panel] of [...chart.element.querySelectorAll(".panel")].entries()) enlarge(chart, panel, index);
    for (const mark of chart.element.querySelectorAll(".mark")) move(chart, mark);
  }

  function write(group, values, fill) {
    const [line, text] = [...kept(group, "content")];
    if (!line || !text) return;
    const made = values.flatMap((value) => {
      const pair = [line.cloneNode(true), text.cloneNode(true)];
      fill(value, ...pair);
      return pair;
    });
    group.replaceChildren(...made);
  }

  function enlarge(chart, panel, index) {
    const [top, height] = numbers(panel.dataset.plot);
    const up = heights(chart, panel);
    const plot = panel.querySelector(".plot");
    const id = `${chart.element.closest("svg").querySelector("title").id}-${chart.key.replace(/\W/g, "")}-${index}`;
    const clip = make("clipPath", {id}, panel);
    make("rect", {x: chart.left, y: top - 3, width: chart.width, height: height + 6}, clip);
    plot.setAttribute("clip-path", `url(#${id})`);
    const scale = -height / (up.top - up.foot), shift = top + height - up.foot * scale;
    panel.up = {scale, shift};
    const [low, high] = range(chart), across = chart.width / (high - low), left = chart.left - low * across;
    for (const group of plot.querySelectorAll(".across, .curves")) {
      kept(group, "transform");
      const y = group.matches(".curves") ? [scale, shift] : [1, 0];
      group.setAttribute("transform", `matrix(${across} 0 0 ${y[0]} ${left} ${y[1]})`);
    }
    const grid = panel.querySelector(".ticks");
    if (!grid) return;
    const most = Math.max(2, Math.min(6, Math.floor(height / 26))), unit = panel.dataset.unit;
    const logarithmic = panel.dataset.log === "1";
    const values = logarithmic ? decades(up.foot, up.top, most) : ticks(up.foot, up.top, most, unit === "count");
    write(grid, values, (tick, line, text) => {
      const y = shift + tick * scale;
      line.setAttribute("d", `M${chart.left} ${y}h${chart.width}`);
      text.setAttribute("y", y + 4);
      text.textContent = word(logarithmic ? Number((10 ** tick).toPrecision(6)) : tick, unit);
    });
  }

  // From where to where a panel reaches, so that what is shown of its curves fills it
  function heights(chart, panel) {
    const foot = Number(panel.dataset.foot), top = Number(panel.dataset.top);
    if (panel.classList.contains("row")) return {foot, top};
    const [low, high] = range(chart);
    let least = Infinity, most = -Infinity;
    for (const curve of panel.querySelectorAll(".curve")) {
      for (const points of stretches(curve)) {
        points.forEach(([x, y], index) => {
          const before = points[index - 1], after = points[index + 1];
          const inside = x >= low && x <= high;
          const beside = (after && x < low && after[0] > low) || (before && x > high && before[0] < high);
          if (!inside && !beside) return;
          least = Math.min(least, y);
          most = Math.max(most, y);
        });
      }
    }
    if (!(most >= least)) return {foot, top};
    if (panel.dataset.zero === "1") return {foot, top: most > 0 ? foot + (most - foot) * 1.14 : top};
    const room = (most - least) * 0.07 || Math.abs(most) * 0.07 || (top - foot) * 0.07;
    return {foot: least - room, top: most + room};
  }

  function move(chart, mark) {
    const [, , y] = /translate\((\S+) (\S+)\)/.exec(kept(mark, "transform"));
    const x = place(chart, Number(mark.dataset.x));
    const panel = mark.closest(".panel");
    const up = "y" in mark.dataset && panel ? panel.up.shift + Number(mark.dataset.y) * panel.up.scale : y;
    mark.setAttribute("transform", `translate(${x} ${up})`);
    const outside = x < chart.left - 0.5 || x > chart.left + chart.width + 0.5;
    mark.setAttribute("visibility", outside ? "hidden" : "visible");
  }

  function zoom(chart, low, high) {
    const least = Math.max((chart.high - chart.low) * MIN, chart.whole ? 1 : 0);
    const length = Math.min(chart.high - chart.low, Math.max(least, high - low));
    const middle = (low + high) / 2;
    const from = Math.min(chart.high - length, Math.max(chart.low, middle - length / 2));
    const all = length >= 0.999 * (chart.high - chart.low);
    view(chart.key).zoom = all ? null : [from, from + length];
    redraw(chart.key);
  }

  // Read values

  function crosshair(chart, host) {
    chart.element.querySelectorAll(".cross").forEach((one) => one.remove());
    const {at} = view(chart.key);
    const [low, high] = range(chart);
    if (press && press.host === host && press.key === chart.key && press.to !== null) {
      const [from, to] = [press.from, press.to].map((value) => place(chart, Math.min(high, Math.max(low, value))));
      make("rect", {class: "cross", x: Math.min(from, to), y: chart.top, width: Math.abs(to - from),
        height: chart.bottom - chart.top, fill: "var(--trainer)", "fill-opacity": 0.15}, chart.element);
    }
    if (at === null || at < low || at > high) return;
    const x = place(chart, at);
    make("path", {class: "cross", d: `M${x} ${chart.top}V${chart.bottom}`, stroke: "var(--ink)", "stroke-width": 1,
      "stroke-dasharray": "2 2", fill: "none"}, chart.element);
  }

  function rows(chart) {
    const {at} = view(chart.key);
    const [low, high] = range(chart), pixel = (high - low) / chart.width;
    const found = [];
    for (const panel of chart.element.querySelectorAll(".panel")) {
      const {title, unit, log} = panel.dataset;
      const own = [];
      for (const curve of panel.querySelectorAll(".curve")) {
        const value = valueOf(curve, at, pixel);
        if (!value) continue;
        const [least, most] = [value.y, value.top].map((y) => log === "1" && y !== undefined ? 10 ** y : y);
        const here = Math.abs(value.x - at) <= SLACK * pixel;
        if (curve.dataset.kind === "dots" && !here && Math.abs(value.x - at) > (high - low) / 4) continue;
        let words = told(least, unit);
        if (most !== undefined && told(most, unit) !== words) words += ` to ${told(most, unit)}`;
        if (!here) words += ` at ${axisWord(chart, value.x)}`;
        own.push({color: curve.dataset.color, label: curve.dataset.label, words, panel: title,
          dashed: Boolean(curve.querySelector("[stroke-dasharray]"))});
      }
      if (!own.length) own.push({color: "", label: "", words: "–", panel: title});
      found.push(...own.map((row, index) => ({...row, panel: index ? "" : row.panel,
        label: row.label || (row.panel === title && index === 0 ? "" : row.label)})));
    }
    return found;
  }

  function axisWord(chart, value) {
    const name = chart.whole ? grouped(value) : number(value);
    return chart.unit ? `${name} ${chart.unit}` : `${chart.name} ${name}`;
  }

  function line(kind, words, parent) {
    const element = document.createElement(kind);
    element.textContent = words;
    parent.append(element);
    return element;
  }

  function tell(aloud) {
    if (!box) {
      box = document.createElement("div");
      box.className = "readout";
      box.setAttribute("role", "status");
      document.body.append(box);
    }
    const chart = active && chartsOf(active.host).find((one) => one.key === active.key);
    if (!chart || view(chart.key).at === null) {
      box.hidden = true;
      return;
    }
    box.setAttribute("aria-live", aloud ? "polite" : "off");
    const list = rows(chart), rest = list.length - MAX_ROWS;
    box.replaceChildren();
    line("b", axisWord(chart, view(chart.key).at), box);
    for (const row of rest > 1 ? list.slice(0, MAX_ROWS) : list) {
      if (row.panel && row.label) line("i", row.panel, box);
      const entry = line("p", "", box);
      const swatch = line("span", "", entry);
      swatch.className = row.dashed ? "dashed" : "swatch";
      if (row.color) swatch.style.borderColor = `var(--${row.color})`;
      line("span", row.label || row.panel, entry).className = "name";
      line("span", row.words, entry).className = "value";
    }
    if (rest > 1) line("i", `and ${rest} more`, box);
    box.hidden = false;
    const svg = chart.element.closest("svg"), shape = svg.getBoundingClientRect();
    const pixels = shape.width / svg.viewBox.baseVal.width;
    const x = shape.left + place(chart, view(chart.key).at) * pixels, wide = document.documentElement.clientWidth;
    let left = x + 14;
    if (left + box.offsetWidth > wide - 4) left = x - 14 - box.offsetWidth;
    if (left < 4) left = x > wide / 2 ? 4 : wide - 4 - box.offsetWidth;
    const high = shape.top + chart.top * pixels;
    box.style.left = `${left + scrollX}px`;
    box.style.top = `${Math.max(4, Math.min(high, innerHeight - box.offsetHeight - 4)) + scrollY}px`;
  }

  // Everything that shows an axis, once it has changed
  function redraw(key, aloud) {
    for (const [host, own] of hosts) {
      let zoomed = false;
      for (const chart of chartsOf(host)) {
        if (chart.key === key) {
          rescale(chart);
          crosshair(chart, host);
        }
        zoomed = zoomed || Boolean(view(chart.key).zoom);
      }
      own.reset.hidden = !zoomed;
    }
    tell(aloud);
  }

  function point(host, chart, at, aloud) {
    const [low, high] = range(chart);
    const inside = Math.min(high, Math.max(low, chart.whole ? Math.round(at) : at));
    leave(chart.key);
    view(chart.key).at = inside;
    active = {host, key: chart.key};
    redraw(chart.key, aloud);
  }

  function leave(but) {
    for (const [key, one] of views) {
      if (key === but || one.at === null) continue;
      one.at = null;
      redraw(key);
    }
    if (!but) {
      active = null;
      tell();
    }
  }

  // Where a pointer is: the chart under it, and the value there
  function under(host, event) {
    for (const chart of chartsOf(host)) {
      const svg = chart.element.closest("svg"), shape = svg.getBoundingClientRect();
      const pixels = shape.width / svg.viewBox.baseVal.width;
      const x = (event.clientX - shape.left) / pixels, y = (event.clientY - shape.top) / pixels;
      if (x < chart.left - 8 || x > chart.left + chart.width + 8 || y < chart.top - 4 || y > chart.bottom + 24) continue;
      const [low, high] = range(chart);
      return {chart, x, value: low + (x - chart.left) / chart.width * (high - low)};
    }
    return null;
  }

  function reset(host) {
    for (const chart of chartsOf(host)) {
      view(chart.key).zoom = null;
      redraw(chart.key);
    }
  }

  // Hands

  function moved(host, event) {
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, event.clientX);
    if (pinch && pinch.host === host) {
      const [one, two] = [...fingers.values()].map((x) => pinch.value(x));
      const [from, to] = [Math.min(one, two), Math.max(one, two)];
      const stretch = (pinch.to - pinch.from) / Math.max(1e-9, to - from);
      const length = (pinch.high - pinch.low) * stretch;
      const low = pinch.middle - (((from + to) / 2 - pinch.low) / (pinch.high - pinch.low)) * length;
      zoom(pinch.chart(), low, low + length);
      return;
    }
    if (press && press.host === host) {
      const chart = chartsOf(host).find((one) => one.key === press.key);
      if (!chart) return;
      if (Math.abs(event.clientX - press.x) > DRAG && event.pointerType === "mouse") press.to = press.value(event.clientX);
      point(host, chart, press.value(event.clientX));
      return;
    }
    const found = under(host, event);
    if (found) point(host, found.chart, found.value);
    else if (event.pointerType === "mouse") leave();
  }

  // From places on the screen to values, as they were when a gesture began
  function valuer(chart) {
    const svg = chart.element.closest("svg"), shape = svg.getBoundingClientRect();
    const pixels = shape.width / svg.viewBox.baseVal.width, [low, high] = range(chart);
    return (x) => low + ((x - shape.left) / pixels - chart.left) / chart.width * (high - low);
  }

  function pressed(host, event) {
    const found = under(host, event);
    if (!found || event.button) return;
    const value = valuer(found.chart);
    if (event.pointerType === "touch") {
      fingers.set(event.pointerId, event.clientX);
      if (fingers.size === 2) {
        const [one, two] = [...fingers.values()].map(value), [low, high] = range(found.chart);
        const key = found.chart.key;
        pinch = {host, value, low, high, from: Math.min(one, two), to: Math.max(one, two), middle: (one + two) / 2,
          chart: () => chartsOf(host).find((chart) => chart.key === key)};
        press = null;
        return;
      }
    }
    press = {host, key: found.chart.key, from: found.value, to: null, x: event.clientX, value};
    host.setPointerCapture(event.pointerId);
    point(host, found.chart, found.value);
  }

  function released(host, event) {
    const touched = fingers.delete(event.pointerId);
    if (pinch) {
      if (!fingers.size) pinch = null;
      return;
    }
    const done = press;
    press = null;
    if (!done || event.type === "pointercancel") return;
    const chart = chartsOf(host).find((one) => one.key === done.key);
    if (chart && done.to !== null) zoom(chart, Math.min(done.from, done.to), Math.max(done.from, done.to));
    if (!touched) return;
    const again = event.timeStamp - tapped.time < TWICE && Math.abs(event.clientX - tapped.x) < 24;
    tapped = {time: again ? 0 : event.timeStamp, x: event.clientX};
    if (again) reset(host);
  }

  function typed(host, event) {
    const charts = chartsOf(host);
    if (!charts.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const chart = charts.find((one) => active && active.host === host && one.key === active.key) || charts[0];
    const [low, high] = range(chart), {at} = view(chart.key);
    const here = at === null || at < low || at > high ? (low + high) / 2 : at;
    const far = (high - low) / (event.shiftKey ? 10 : 100), step = chart.whole ? Math.max(1, Math.round(far)) : far;
    const keys = {
      ArrowLeft: () => point(host, chart, here - step, true),
      ArrowRight: () => point(host, chart, here + step, true),
      Home: () => point(host, chart, low, true),
      End: () => point(host, chart, high, true),
      "+": () => zoom(chart, here - (here - low) / 2, here + (high - here) / 2),
      "=": () => zoom(chart, here - (here - low) / 2, here + (high - here) / 2),
      "-": () => zoom(chart, here - 2 * (here - low), here + 2 * (high - here)),
      PageUp: () => point(host, charts[Math.max(0, charts.indexOf(chart) - 1)], here, true),
      PageDown: () => point(host, charts[Math.min(charts.length - 1, charts.indexOf(chart) + 1)], here, true),
      Escape: () => {
        reset(host);
        leave();
      },
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  }

  function add(host) {
    const title = host.closest("section")?.querySelector("h2")?.textContent || "Chart";
    for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", `${title}. ${HINT}`]]) {
      host.setAttribute(name, value);
    }
    const button = document.createElement("button");
    button.type = "button";
    button.className = "reset";
    button.textContent = "Show all";
    button.hidden = true;
    button.addEventListener("click", () => reset(host));
    host.before(button);
    hosts.set(host, {reset: button});
    host.addEventListener("pointermove", (event) => moved(host, event));
    host.addEventListener("pointerdown", (event) => pressed(host, event));
    host.addEventListener("pointerup", (event) => released(host, event));
    host.addEventListener("pointercancel", (event) => released(host, event));
    host.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && !press && leave());
    host.addEventListener("dblclick", () => reset(host));
    host.addEventListener("keydown", (event) => typed(host, event));
    host.addEventListener("blur", () => leave());
  }

  // The content of a host is new: show it as the one before it was shown
  function adopt(host) {
    if (!hosts.has(host)) return;
    for (const chart of chartsOf(host)) {
      if (view(chart.key).zoom) rescale(chart);
      crosshair(chart, host);
    }
    if (active && active.host === host) tell();
  }

  document.querySelectorAll(".charted").forEach(add);
  return {adopt, told, word};
})();
