"""What one or several steps spent their time on: kept in a file, summed up, compared and drawn.

``spans`` says what a trace is, ``figures`` sums it up, ``chrome`` is the file that Perfetto and Chrome open as well,
``picture`` draws it, ``difference`` sets two side by side, and ``command`` is the command line. Recording one is the
timeline's affair. Nothing here knows Paddle, so that a trace can be read where there is none.
"""

from __future__ import annotations
