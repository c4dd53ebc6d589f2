// A browser starts no worker from a file on the disk. Its script runs in a hidden frame instead, so that search works.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      this.ready = new Promise(resolve => script.addEventListener("load", () => resolve(inside)));
      script.src = url;
      inside.document.body.append(script);
      this.terminate = () => frame.remove();
    }

    postMessage(data) {
      const copy = structuredClone(data);
      this.ready.then(inside => inside.dispatchEvent(new MessageEvent("message", { data: copy })));
    }
  };
}
