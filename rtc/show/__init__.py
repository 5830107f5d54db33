"""Reports for people: text on a terminal, and one HTML file with inline SVG."""
