"""Reports that people open in a browser or print: one HTML file each, complete in itself.

No measuring and no arithmetic lives here, only how results look. Needs matplotlib for charts,
imported when the first one is drawn. Read `page.py` first, then `charts.py`.
"""
