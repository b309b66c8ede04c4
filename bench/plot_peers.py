"""Draws a result of peers_cuda.py as an SVG: time of forward + backward over memory, both axes logarithmic.

    python3 bench/plot_peers.py bench/results/h200-2026-11-30-peers.json 4096x4096x131072 docs/peers-h200.svg
"""
import json
import math
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 70, 170, 40, 56


def main():
    result = json.load(open(sys.argv[1], encoding="utf-8"))
    problem = next(p for p in result["problems"] if p["problem"] == sys.argv[2])
    rows = [r for r in problem["rows"] if r["phase"] == "fwd+bwd"]
    x_low, x_high = 1.0, 10.0 ** math.ceil(math.log10(max(r["extra_mib"] for r in rows)))
    y_low, y_high = 10.0, 10.0 ** math.ceil(math.log10(max(r["ms"] for r in rows)))
    y_low = min(y_low, problem["g3_ms"] / 1.2)

    def x(mib):
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(max(mib, x_low) / x_low) / math.log(x_high / x_low)

    def y(ms):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(ms / y_low) / math.log(y_high / y_low)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
           f'<text x="{LEFT}" y="22" font-size="14">Forward + backward on one {result["machine"]}, bf16, '
           f'{sys.argv[2].replace("x", " x ")} (tokens x hidden x vocabulary)</text>']
    for mib in (1, 10, 100, 1000, 10000):
        if mib <= x_high:
            out.append(f'<path d="M{x(mib):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>'
                       f'<text x="{x(mib):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{mib}</text>')
    for ms in (10, 20, 50, 100):
        if y_low <= ms <= y_high:
            out.append(f'<path d="M{LEFT} {y(ms):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
                       f'<text x="{LEFT - 8}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms}</text>')
    floor = y(problem["g3_ms"])
    out.append(f'<path d="M{LEFT} {floor:.1f}H{WIDTH - RIGHT}" stroke="#888" stroke-dasharray="6 4"/>'
               f'<text x="{WIDTH - RIGHT + 6}" y="{floor + 4:.1f}" fill="#555">three cuBLAS GEMMs</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">memory at the peak beyond inputs '
               'and gradients, MiB</text>')
    out.append(f'<text transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">ms</text>')
    for r in rows:
        ours = r["method"].startswith("logitless")
        color = "#c22" if ours else "#247"
        left = r["method"] == "logitless"  # its neighbour's name goes to the right
        out.append(f'<circle cx="{x(r["extra_mib"]):.1f}" cy="{y(r["ms"]):.1f}" r="5" fill="{color}"/>'
                   f'<text x="{x(r["extra_mib"]) + (-9 if left else 9):.1f}" y="{y(r["ms"]) + 4:.1f}" fill="{color}" '
                   f'text-anchor="{"end" if left else "start"}">'
                   f'{r["method"]} {r["ms"]:.1f}</text>')
    out.append("</svg>")
    with open(sys.argv[3], "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
