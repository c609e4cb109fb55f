// Sets the remembered theme, else the system's is shown. It runs before the first paint; modules would be too late.
const remembered = localStorage.getItem("theme");
if (remembered) document.documentElement.dataset.theme = remembered;
