/* Figures last: they need the charts' library, which is most of the page. */
"use strict";
KV.charts.start();
document.documentElement.dataset.ready = "true";
