"""Answers described once, for a terminal, a page and a notebook.

An answer is a ``View`` (``views/view.py``): a headline, key figures and parts. A section of ``data/views.txt`` declares
what it says (``views/declared.py``); a function ``xxx_view(facts)`` adds what has to be computed from the facts of a
result. ``terminal.py`` writes it as text, ``html.py`` as a self-contained page or one in the frame of a notebook. The
vocabulary:

``Headline``   the number that was asked for, its interval, and what it describes
``Figure``     a key figure: a line of text, a card on the page
``Table``      rows of cells; a cell has a text and the value it sorts by
``Bars``       one bar per row, of one or several kinds: a table in text; those of parts that sum to a total
               (``breakdown``), of times by name, of pairs of values, and of communication that is exposed or hidden
``HeatMap``    a share over time per row, as shades
``GridCharts`` values by two settings, shaded (page only)
``Scatter``    dots and lines within two axes (page only)
``TimelineChart``  every span of a run (page only)
``FactList``   names and values
``Remarks``    sentences with their evidence
``Commands``   command lines to copy
``Columns``    parts next to each other on a page, one after the other in text

The title of a part is its name in text and on the page. A part that is a detail appears in text with ``--verbose``
alone, and always on the page.
"""
