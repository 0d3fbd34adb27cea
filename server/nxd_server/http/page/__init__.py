"""The page at ``/``: plain HTML, CSS and modules of JavaScript, which no build step makes."""
