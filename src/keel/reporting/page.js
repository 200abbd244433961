// The report's script: draws the charts of a setting when they come into view, and computes the table for the
// target that the reader picks. Text from runs is only ever set as text.
const { paper, sections } = JSON.parse(document.getElementById("data").textContent);
const MOST_ROWS = 8000;  // of a chart: curves of many methods are thinned further

// Half to even, as Python rounds.
const fixed = (value, digits) => {
  const [whole, rest] = value.toFixed(20).split(".");
  if (!/^50*$/.test(rest.slice(digits))) return value.toFixed(digits);
  const cut = digits ? `${whole}.${rest.slice(0, digits)}` : whole;
  const even = Number(cut.at(-1)) % 2 === 0;
  return even ? cut : (Number(cut) + Math.sign(value) * 10 ** -digits).toFixed(digits);
};
const percent = value => value === null ? "-" : `${fixed(100 * value, 1)} %`;
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
// A value of a chart, in the form that its tooltip has.
const told = (value, format) => {
  if (typeof value !== "number") return value ?? "-";
  if (format.includes("%")) return percent(value);
  return format.endsWith("s") ? size(value) : String(Number(value.toPrecision(4)));
};
const duration = value => {
  if (value === null) return "-";
  if (value < 60) return `${fixed(value, 1)} s`;
  const minutes = Number(fixed(value / 60, 0)), hours = Math.floor(minutes / 60);
  return hours ? `${hours}:${String(minutes % 60).padStart(2, "0")} h` : `${minutes} min`;
};

// A method comes to stand at each of its levels in turn; the first that is not below the target reaches it.
const reaches = (standing, target) => {
  const found = target === null ? undefined : standing.find(([level]) => level >= target - 1e-9);
  return found ? { rounds: found[1], bytes: found[2], seconds: found[3] } : null;
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
              titleFontWeight: "normal", orient: "top", gradientLength: 140, gradientThickness: 10 },
    text: { color: colour("--ink") },
    range: { heatmap: [colour("--cold"), colour("--warm")] },
  };
};

const each = (root, selector, what) => root.querySelectorAll(selector).forEach(what);

class Setting {
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.target = data.target;
    this.seen = new Set();
    this.waiting = new Set();
    this.busy = new Set();
    this.views = new Map();
    const redraw = () => this.drawMethods();
    each(root, ".axes select, .axes input, .methods input", input => input.addEventListener("change", redraw));
    each(root, ".methods button", button => button.addEventListener("click", () => this.pick(button.value)));
    each(root, "thead button", button => button.addEventListener("click", () => this.sort(button.closest("th"))));
    each(root, ".values", values => values.addEventListener("toggle", () => this.list(values)));
    each(root, ".save", button => button.addEventListener("click", () => this.save(button)));
    this.slider = root.querySelector(".target input");
    this.slider.addEventListener("input", () => this.aim(Number(this.slider.value) / 100));
    root.querySelector(".target button")?.addEventListener("click", () => {
      this.slider.value = 100 * this.data.target;
      this.aim(this.data.target);
    });
    const watcher = new IntersectionObserver(entries => {
      for (const entry of entries.filter(entry => entry.isIntersecting && !this.seen.has(entry.target))) {
        this.seen.add(entry.target);
        this.draw(entry.target);
      }
    }, { rootMargin: "400px" });
    each(root, ".chart", chart => watcher.observe(chart));
    addEventListener("beforeprint", () => each(root, ".chart", chart => {
      if (!this.seen.has(chart)) {
        this.seen.add(chart);
        this.draw(chart);
      }
    }));
  }

  get picked() {
    return [...this.root.querySelectorAll(".methods input:checked")].map(box => Number(box.value)).sort((a, b) => a - b);
  }

  pick(which) {
    each(this.root, ".methods input", box => { box.checked = which === "all" || (which === "best" && box.defaultChecked); });
    this.drawMethods();
  }

  // The name of the chart that a place shows now.
  name(place) {
    const { kind } = place.dataset;
    const over = this.root.querySelector(".over").value;
    if (kind === "curves") return `${this.root.querySelector(".what").value}-over-${over}`;
    return kind === "cost" ? `accuracy-and-${over}` : kind;
  }

  rows(name) {
    const { labels, curves, drift, pictures, final, standing, second } = this.data;
    if (name in pictures) {
      const { fields, rows } = pictures[name];
      return rows.map(row => Object.fromEntries(fields.map((field, i) => [field, row[i]])));
    }
    if (name.includes("-and-")) {
      const over = name.split("-and-")[1];
      return this.picked.flatMap(i => {
        const spent = reaches(standing[i], this.target);
        const [mean, spread] = final[i];
        if (!spent || mean === null) return [];
        const x = over === "time" ? spent.seconds / second : spent[over];
        return [{ method: labels[i], x, mean, low: mean - spread, high: mean + spread }];
      });
    }
    const [what, over] = name.includes("-over-") ? name.split("-over-") : [name, "rounds"];
    const source = name.includes("-over-") ? curves : drift;
    const known = this.picked.filter(i => what in source[i]);
    const all = known.reduce((sum, i) => sum + source[i][over].length, 0);
    const stride = Math.ceil(all / MOST_ROWS);
    return known.flatMap(i => {
      const { [over]: xs, [what]: { mean, low = mean, high = mean } } = source[i];
      return xs.map((x, k) => ({ method: labels[i], x, mean: mean[k], low: low[k], high: high[k] }))
        .filter((row, k) => row.mean !== null && (k % stride === 0 || k === xs.length - 1));
    });
  }

  // The chart as it is to be drawn: with its data, and with the scales that the reader chose.
  specification(place, config) {
    const name = this.name(place);
    const spec = structuredClone(this.data.charts[name]);
    let rows = this.rows(name);
    if (place.dataset.kind === "curves") {
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
    }
    if (this.target === null) spec.layer = spec.layer?.filter(layer => layer.data?.name !== "targets");
    return { ...spec, config, datasets: { rows, targets: [{ target: this.target }] } };
  }

  // One at a time in each place; what changes meanwhile is drawn afterwards.
  async draw(place) {
    delete place.dataset.drawn;
    this.waiting.add(place);
    if (this.busy.has(place)) return;
    this.busy.add(place);
    while (this.waiting.delete(place)) await this.embed(place);
    this.busy.delete(place);
    place.dataset.drawn = this.name(place);
    this.list(place.closest("figure").querySelector(".values"));
  }

  // What the pointer shows of each point, as a table, for those who do not point.
  list(values) {
    if (!values.open) return;
    const name = this.name(values.closest("figure").querySelector(".chart"));
    const { layer = [], encoding } = this.data.charts[name];
    const { tooltip } = [encoding, ...layer.map(one => one.encoding)].find(found => found?.tooltip);
    const table = document.createElement("table");
    const add = (row, kind, text) => row.appendChild(Object.assign(document.createElement(kind), { textContent: text }));
    const head = table.createTHead().insertRow();
    for (const { field, title } of tooltip) add(head, "th", title ?? field).scope = "col";
    const body = table.createTBody();
    for (const point of this.rows(name)) {
      const row = body.insertRow();
      for (const { field, format = "" } of tooltip) add(row, "td", told(point[field], format));
    }
    values.querySelector("div").replaceChildren(table);
  }

  async embed(place) {
    this.views.get(place)?.finalize();
    this.views.delete(place);
    const config = theme();
    const legend = place.dataset.kind in this.data.pictures ? config.legend : { disable: true };
    const spec = this.specification(place, { ...config, legend });
    if (!spec.datasets.rows.length) {
      place.textContent = "None of the picked methods has values here.";
      return;
    }
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const options = { actions: false, renderer: "canvas", tooltip: { theme: dark ? "dark" : "light" } };
    this.views.set(place, await vegaEmbed(place, spec, options));
  }

  drawMethods() {
    for (const place of this.seen) if (!(place.dataset.kind in this.data.pictures)) this.draw(place);
  }

  drawAll() {
    for (const place of this.seen) this.draw(place);
  }

  aim(target) {
    const first = this.target === null;
    this.target = target;
    this.tell();
    if (first) return this.drawMethods();
    for (const place of this.seen) {
      if (place.dataset.kind === "cost") this.draw(place);
      else if (this.name(place).startsWith("accuracy-over")) {
        this.views.get(place)?.view.data("targets", [{ target }]).runAsync();
      }
    }
  }

  // The table's columns for the target.
  tell() {
    const { standing, baseline } = this.data;
    const reference = baseline === null ? null : reaches(standing[baseline], this.target);
    this.root.querySelector(".target output").textContent = percent(this.target);
    this.slider.setAttribute("aria-valuetext", percent(this.target));
    each(this.root, ".results tbody tr", row => {
      const spent = reaches(standing[row.dataset.method], this.target);
      const saved = what => spent && reference && reference[what] ? 1 - spent[what] / reference[what] : null;
      const found = {
        rounds: [spent?.rounds ?? null, value => this.target === null ? "-" : value === null ? "never" : String(value)],
        "rounds-saved": [saved("rounds"), change],
        bytes: [spent?.bytes ?? null, size],
        "bytes-saved": [saved("bytes"), change],
        time: [spent?.seconds ?? null, duration],
      };
      for (const [name, [value, text]] of Object.entries(found)) {
        const cell = row.querySelector(`.${name}`);
        cell.textContent = text(value);
        cell.dataset.value = value ?? "";
      }
    });
  }

  // By the column of this head; again, the other way round. What is not known stays last.
  sort(head) {
    const way = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    each(head.parentElement, "th", other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", way);
    const body = head.closest("table").tBodies[0];
    const sign = way === "ascending" ? 1 : -1;
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
    const place = button.closest("figure").querySelector(".chart");
    const spec = { ...this.specification(place, paper), width: 640 };
    const { view, finalize } = await vegaEmbed(document.createElement("div"), spec, { actions: false });
    const link = document.createElement("a");
    link.href = await view.toImageURL(button.value, 2);
    link.download = `${this.name(place)}.${button.value}`;
    link.click();
    finalize();
  }
}

const settings = sections.map((data, i) => new Setting(document.getElementById(`setting-${i + 1}`), data));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => settings.forEach(setting => setting.drawAll()));
