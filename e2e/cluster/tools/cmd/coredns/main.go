// Command coredns is CoreDNS with only the plugins the test cluster's Corefile names.
//
// The full CoreDNS links every cloud provider's client (1378 packages); these few keep the build short.
package main

import (
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() { coremain.Run() }
