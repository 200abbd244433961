// The script of the report: draws the charts of a setting when they come into view, and computes the table for the
// target that the reader selects. Text from runs is only ever inserted as text, never as HTML.
const readData = page => JSON.parse(page.getElementById("data").textContent);
const { paper } = readData(document);
const safe = { actions: false, ast: true };  // interprets expressions: the page's policy forbids to compile them
const MAX_ROWS = 8000;  // per chart: curves of many methods are thinned further

// Rounds half to even, as Python does.
const fixed = (value, digits) => {
  if (Math.abs(value) >= 1e20) return value.toExponential(3);
  const [whole, rest] = value.toFixed(20).split(".");
  if (!/^50*$/.test(rest.slice(digits))) return value.toFixed(digits);
  const cut = digits ? `${whole}.${rest.slice(0, digits)}` : whole;
  const even = Number(cut.at(-1)) % 2 === 0;
  return even ? cut : (Number(cut) + Math.sign(value) * 10 ** -digits).toFixed(digits);
};
const percent = value => value === null ? "-" : `${fixed(100 * value, 1)} %`;
// As Python's `number`: four significant digits.
const number = value => {
  if (value === null) return "-";
  const magnitude = Math.abs(value);
  if (magnitude && !(magnitude >= 1e-4 && magnitude < 1e6)) {
    return value.toExponential(3).replace(/e([+-])(\d)$/, "e$10$2");
  }
  return fixed(value, magnitude ? Math.max(0, 3 - Math.floor(Math.log10(magnitude))) : 3);
};
const change = saved => {
  if (saved === null) return "-";
  const amount = `${fixed(100 * Math.abs(saved), 0)} %`;
  return amount === "0 %" ? amount : `${saved > 0 ? "↓" : "↑"} ${amount}`;
};
const size = value => {
  if (value === null) return "-";
  for (const [unit, divisor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= divisor) return `${fixed(value / divisor, 1)} ${unit}`;
  }
  return `${value} B`;
};
// Formats a value of a chart as its tooltip does.
const formatted = (value, format) => {
  if (typeof value !== "number") return value ?? "-";
  if (format.includes("%")) return percent(value);
  return format.endsWith("s") ? size(value) : String(Number(value.toPrecision(4)));
};
const duration = value => {
  if (value === null) return "-";
  if (value < 60) return `${fixed(value, 1)} s`;
  const minutes = Number(fixed(value / 60, 0)), hours = Math.floor(minutes / 60);
  if (hours >= 24) return `${fixed(minutes / 1440, hours >= 240 ? 0 : 1)} days`;
  return [hours ? `${hours} h` : "", minutes % 60 ? `${minutes % 60} min` : ""].filter(Boolean).join(" ");
};

// Milestones are the new best values of the smoothed metric, in order: the first not worse than the target reaches it.
const reaches = (milestones, target, sign) => {
  const least = sign * target - 1e-9 * Math.abs(target);
  const milestone = target === null ? undefined : milestones.find(([level]) => sign * level >= least);
  return milestone ? { rounds: milestone[1], bytes: milestone[2], seconds: milestone[3] } : null;
};

// Averages each value with those of the rounds before it, so many rounds in all.
const smoothed = (values, rounds, window) => {
  if (window <= 1) return values;
  let first = 0;
  return values.map((value, k) => {
    while (rounds[first] <= rounds[k] - window) first += 1;
    const near = values.slice(first, k + 1).filter(each => each !== null);
    return value === null ? null : near.reduce((sum, each) => sum + each, 0) / near.length;
  });
};

// The vertical range of the second half of the curves, with a margin.
const laterRange = rows => {
  const least = Math.min(...rows.map(row => row.x)), most = Math.max(...rows.map(row => row.x));
  const later = rows.filter(row => row.x >= (least + most) / 2).map(row => row.mean);
  const low = Math.min(...later), high = Math.max(...later), margin = (high - low) / 5;
  return [low - margin, high + margin];
};

const theme = () => {
  const style = getComputedStyle(document.documentElement);
  const colour = name => style.getPropertyValue(name).trim();
  return {
    background: null, font: style.getPropertyValue("--font"), view: { stroke: null },
    axis: { labelColor: colour("--soft"), titleColor: colour("--soft"), gridColor: colour("--grid"),
            domainColor: colour("--line"), tickColor: colour("--line"), labelFontSize: 12, titleFontSize: 12,
            titleFontWeight: "normal", titlePadding: 10 },
    legend: { labelColor: colour("--soft"), titleColor: colour("--soft"), labelFontSize: 12, titleFontSize: 12,
              titleFontWeight: "normal", orient: "top", gradientLength: 140, gradientThickness: 10, labelLimit: 320,
              symbolType: "stroke", symbolSize: 400, symbolOpacity: 1, symbolStrokeWidth: 2.5 },
    text: { color: colour("--ink") },
    range: { heatmap: [colour("--cold"), colour("--warm")] },
  };
};

const forEach = (root, selector, what) => root.querySelectorAll(selector).forEach(what);

class Setting {
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.target = data.target;
    this.scale = data.is_fraction ? 100 : 1;  // of the slider
    this.text = data.is_fraction ? percent : number;
    this.visible = new Set();
    this.waiting = new Set();
    this.busy = new Set();
    this.views = new Map();
    this.ended = new AbortController();
    const redraw = () => this.drawMethods();
    forEach(root, ".axes select, .axes input, .methods input", input => input.addEventListener("change", redraw));
    forEach(root, ".methods button", button => button.addEventListener("click", () => this.select(button.value)));
    forEach(root, "thead button", button => button.addEventListener("click", () => this.sort(button.closest("th"))));
    forEach(root, ".values", values => values.addEventListener("toggle", () => this.list(values)));
    forEach(root, ".save", button => button.addEventListener("click", () => this.save(button)));
    this.slider = root.querySelector(".target input");
    this.slider.addEventListener("input", () => this.setTarget(Number(this.slider.value) / this.scale));
    root.querySelector(".target button")?.addEventListener("click", () => {
      this.slider.value = this.scale * this.data.target;
      this.setTarget(this.data.target);
    });
    this.watcher = new IntersectionObserver(entries => {
      for (const entry of entries.filter(entry => entry.isIntersecting && !this.visible.has(entry.target))) {
        this.visible.add(entry.target);
        this.draw(entry.target);
      }
    }, { rootMargin: "400px" });
    forEach(root, ".chart", chart => this.watcher.observe(chart));
    addEventListener("beforeprint", () => forEach(root, ".chart", chart => {
      if (!this.visible.has(chart)) {
        this.visible.add(chart);
        this.draw(chart);
      }
    }), { signal: this.ended.signal });
  }

  // Releases the charts, before a newer state of the page takes their place.
  end() {
    this.ended.abort();
    this.watcher.disconnect();
    for (const view of this.views.values()) view.finalize();
  }

  // What the reader has selected. Methods are named by their labels: there may be more of them in a newer state.
  get choices() {
    const inputs = [...this.root.querySelectorAll(".axes select, .axes input")];
    const boxes = [...this.root.querySelectorAll(".methods input")];
    return {
      axes: inputs.map(input => [input.className, input.type === "checkbox" ? input.checked : input.value]),
      methods: new Map(boxes.map(box => [this.data.labels[box.value], box.checked])),
      target: this.target === this.data.target ? undefined : this.target,
      open: [...this.root.querySelectorAll(".values")].map(values => values.open),
    };
  }

  set choices({ axes, methods, target, open }) {
    for (const [name, value] of axes) {
      const input = this.root.querySelector(`.axes .${name}`);
      if (input) input[input.type === "checkbox" ? "checked" : "value"] = value;
    }
    forEach(this.root, ".methods input", box => { box.checked = methods.get(this.data.labels[box.value]) ?? box.checked; });
    [...this.root.querySelectorAll(".values")].forEach((values, i) => { values.open = open[i] ?? false; });
    if (target !== undefined) {
      this.slider.value = this.scale * target;
      this.setTarget(target);
    }
  }

  get selected() {
    return [...this.root.querySelectorAll(".methods input:checked")].map(box => Number(box.value)).sort((a, b) => a - b);
  }

  select(which) {
    forEach(this.root, ".methods input", box => { box.checked = which === "all" || (which === "best" && box.defaultChecked); });
    this.drawMethods();
  }

  // The name of the chart that an element shows now.
  name(element) {
    const { kind } = element.dataset;
    const over = this.root.querySelector(".over").value;
    if (kind === "curves") return `${this.root.querySelector(".what").value}-over-${over}`;
    return kind === "cost" ? `${this.data.metric}-and-${over}` : kind;
  }

  rows(name) {
    const { labels, curves, drift, other, heatmaps, final, milestones, sign, unit_seconds } = this.data;
    if (name in heatmaps) {
      const { fields, rows } = heatmaps[name];
      return rows.map(row => Object.fromEntries(fields.map((field, i) => [field, row[i]])));
    }
    if (other.some(series => name in series)) return this.points(other.map(series => series[name] ?? {}), "value", "rounds");
    const [, what, word, over] = name.match(/^(.*)-(and|over)-(rounds|bytes|time)$/s) ?? [];
    if (word === "and") {
      return this.selected.flatMap(i => {
        const spent = reaches(milestones[i], this.target, sign);
        const [mean, spread] = final[i];
        if (!spent || mean === null) return [];
        const x = over === "time" ? spent.seconds / unit_seconds : spent[over];
        return [{ method: labels[i], x, mean, low: mean - spread, high: mean + spread }];
      });
    }
    return word === "over" ? this.points(curves, what, over) : this.points(drift, name, "rounds");
  }

  // The points of the selected methods: a quantity of their columns over another column.
  points(source, what, over) {
    const { labels } = this.data;
    const present = this.selected.filter(i => what in (source[i].series ?? {}));
    const all = present.reduce((sum, i) => sum + source[i][over].length, 0);
    const stride = Math.ceil(all / MAX_ROWS);
    const curves = source === this.data.curves;
    const window = curves ? Number(this.root.querySelector(".smoothing").value) : 1;
    return present.flatMap(i => {
      const { [over]: xs, rounds, series: { [what]: { mean, low = mean, high = mean, seeds = [] } } } = source[i];
      const single = curves && this.root.querySelector(".seeds")?.checked && seeds.length;
      const lines = single ? seeds.map(values => [values, values, values]) : [[mean, low, high]];
      return lines.flatMap((line, seed) => {
        const [mid, least, most] = line.map(values => smoothed(values, rounds, window));
        return xs.map((x, k) => ({ method: labels[i], x, mean: mid[k], low: least[k], high: most[k], ...(single ? { seed } : {}) }))
          .filter((row, k) => row.mean !== null && (k % stride === 0 || k === xs.length - 1));
      });
    });
  }

  // The chart with its data, and with the scales that the reader selected.
  specification(element, config) {
    const name = this.name(element);
    const spec = structuredClone(this.data.charts[name]);
    let rows = this.rows(name);
    if (element.dataset.kind === "curves") {
      const logarithmic = axis => this.root.querySelector(`.log-${axis}`).checked;
      if (logarithmic("y")) {
        rows = rows.filter(row => row.mean > 0);
        const least = Math.min(...rows.map(row => row.low > 0 ? row.low : row.mean));
        for (const row of rows) row.low = Math.max(row.low, least);
      }
      for (const { encoding } of spec.layer) {
        for (const axis of ["x", "y"].filter(axis => logarithmic(axis) && encoding[axis]?.scale)) {
          encoding[axis].scale = { type: "log", nice: false };
        }
      }
      if (this.root.querySelector(".zoom").checked && rows.length) {
        const domain = laterRange(rows);
        if (domain[0] < domain[1] && (domain[0] > 0 || !logarithmic("y"))) {
          for (const layer of spec.layer) {
            layer.mark = typeof layer.mark === "string" ? { type: layer.mark, clip: true } : { ...layer.mark, clip: true };
            if (layer.encoding.y?.scale) Object.assign(layer.encoding.y.scale, { domain, nice: false });
          }
        }
      }
    }
    if (this.target === null) spec.layer = spec.layer?.filter(layer => layer.data?.name !== "targets");
    return { ...spec, config, datasets: { rows, targets: [{ target: this.target }] } };
  }

  // Draws one chart at a time in each element; a change during drawing is drawn afterwards.
  async draw(element) {
    delete element.dataset.drawn;
    this.waiting.add(element);
    if (this.busy.has(element)) return;
    this.busy.add(element);
    while (this.waiting.delete(element)) await this.embed(element);
    this.busy.delete(element);
    element.dataset.drawn = this.name(element);
    this.list(element.closest("figure").querySelector(".values"));
  }

  // The tooltips of all points as a table, for the keyboard and for screen readers.
  list(values) {
    if (!values.open) return;
    const name = this.name(values.closest("figure").querySelector(".chart"));
    const { layer = [], encoding } = this.data.charts[name];
    const { tooltip } = [encoding, ...layer.map(one => one.encoding)].find(one => one?.tooltip);
    const table = document.createElement("table");
    const add = (row, kind, text) => row.appendChild(Object.assign(document.createElement(kind), { textContent: text }));
    const head = table.createTHead().insertRow();
    for (const { field, title } of tooltip) add(head, "th", title ?? field).scope = "col";
    const body = table.createTBody();
    for (const point of this.rows(name)) {
      const row = body.insertRow();
      for (const { field, format = "" } of tooltip) add(row, "td", formatted(point[field], format));
    }
    values.querySelector("div").replaceChildren(table);
  }

  async embed(element) {
    this.views.get(element)?.finalize();
    this.views.delete(element);
    const config = theme();
    const columns = element.clientWidth < 480 ? 1 : 2;
    const legend = element.dataset.kind in this.data.heatmaps ? { ...config.legend, columns } : { disable: true };
    const spec = this.specification(element, { ...config, legend });
    if (!spec.datasets.rows.length) {
      element.textContent = "The selected methods have no values for this chart.";
      return;
    }
    if (typeof vegaEmbed === "undefined") {
      element.textContent = "This page has no charts; open Values for the numbers.";
      return;
    }
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const options = { ...safe, renderer: "canvas", tooltip: { theme: dark ? "dark" : "light" } };
    this.views.set(element, await vegaEmbed(element, spec, options));
  }

  drawMethods() {
    for (const element of this.visible) if (!(element.dataset.kind in this.data.heatmaps)) this.draw(element);
  }

  drawAll() {
    for (const element of this.visible) this.draw(element);
  }

  setTarget(target) {
    const first = this.target === null;
    this.target = target;
    this.fillTable();
    if (first) return this.drawMethods();
    for (const element of this.visible) {
      if (element.dataset.kind === "cost") this.draw(element);
      else if (this.name(element).startsWith(`${this.data.metric}-over-`)) {
        this.views.get(element)?.view.data("targets", [{ target }]).runAsync();
      }
    }
  }

  // Fills the columns of the table that depend on the target.
  fillTable() {
    const { milestones, baseline, sign } = this.data;
    const reference = baseline === null ? null : reaches(milestones[baseline], this.target, sign);
    this.root.querySelector(".target output").textContent = this.text(this.target);
    this.slider.setAttribute("aria-valuetext", this.text(this.target));
    forEach(this.root, ".results tbody tr", row => {
      const spent = reaches(milestones[row.dataset.method], this.target, sign);
      const saved = what => spent && reference && reference[what] ? 1 - spent[what] / reference[what] : null;
      const cells = {
        rounds: [spent?.rounds ?? null, value => this.target === null ? "-" : value === null ? "never" : String(value)],
        "rounds-saved": [saved("rounds"), change],
        bytes: [spent?.bytes ?? null, size],
        "bytes-saved": [saved("bytes"), change],
        time: [spent?.seconds ?? null, duration],
      };
      for (const [name, [value, text]] of Object.entries(cells)) {
        const cell = row.querySelector(`.${name}`);
        cell.textContent = text(value);
        cell.dataset.value = value ?? "";
      }
    });
  }

  // Sorts by the column of this header; a second click reverses the order. Missing values stay last.
  sort(head) {
    const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    forEach(head.parentElement, "th", other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    const body = head.closest("table").tBodies[0];
    const sign = order === "ascending" ? 1 : -1;
    const key = row => {
      const cell = row.cells[head.cellIndex];
      return "value" in cell.dataset ? (cell.dataset.value === "" ? null : Number(cell.dataset.value)) : cell.textContent;
    };
    const compare = (a, b) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
    };
    body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
  }

  async save(button) {
    const element = button.closest("figure").querySelector(".chart");
    const spec = { ...this.specification(element, paper), width: 640 };
    const { view, finalize } = await vegaEmbed(document.createElement("div"), spec, safe);
    const link = document.createElement("a");
    link.href = await view.toImageURL(button.value, 2);
    link.download = `${this.name(element)}.${button.value}`;
    link.click();
    finalize();
  }
}

const makeSettings = () => readData(document).sections
  .map((data, i) => new Setting(document.getElementById(`setting-${i + 1}`), data));
let settings = makeSettings();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => settings.forEach(setting => setting.drawAll()));

// Puts a newer state of the page in place of this one, and keeps what the reader has selected.
const show = page => {
  const choices = settings.map(setting => setting.choices);
  const { scrollX, scrollY } = window;
  settings.forEach(setting => setting.end());
  document.title = page.title;
  for (const part of ["header", "main", "#data"]) {
    document.querySelector(part).replaceWith(document.importNode(page.querySelector(part), true));
  }
  settings = makeSettings();
  settings.forEach((setting, i) => { if (choices[i]) setting.choices = choices[i]; });
  scrollTo(scrollX, scrollY);
};

// keel report --watch: asks every two seconds whether the runs have another state than the page.
const follow = async update => {
  let text = "This page follows the runs.";
  try {
    const answer = await fetch(update, { cache: "no-store" });
    if (answer.status === 200) {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      show(page);
      update = page.body.dataset.update;
    }
  } catch {
    text = "keel report has ended: this is the last state of the page.";
  }
  document.getElementById("connection").textContent = text;
  setTimeout(() => follow(update), 2000);
};
if (document.body.dataset.update) follow(document.body.dataset.update);
