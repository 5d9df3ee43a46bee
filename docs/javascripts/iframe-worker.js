// The search of a site that is opened from a disk: there a browser starts no worker, so its script runs in a hidden frame.
// (Material's `offline` plugin would fetch such a script from the network; a file called iframe-worker stands in for it.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = async (...addresses) => {
        for (const address of addresses) await load(inside.document, address)
      }
      this.ready = load(inside.document, url)
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }

  function load(page, address) {
    return new Promise((resolve, reject) => {
      const script = page.createElement("script")
      script.src = address
      script.onload = resolve
      script.onerror = () => reject(new Error(`Expected a script at ${address}.`))
      page.body.appendChild(script)
    })
  }
}
