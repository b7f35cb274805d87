"""Published tables and figures, run again: what to run is data below ``recipes/``, here is what reads and runs it.

``published`` the YAML of a paper's experiments · ``plan`` from there to recipes · ``runner`` runs them, once each ·
``parallel`` several at a time · ``orders`` Kendall's tau · ``tables`` and ``costs`` our numbers beside the paper's ·
``figures`` the plots · ``measured`` what a finished run has read · ``archive`` published runs in one file.
"""
